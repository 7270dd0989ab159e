package order

import (
	"errors"
	"time"

	"github.com/google/uuid"
)

// This file has what operators see of orders, and do with them.

// maxReasonChars bounds the reason of an operator's cancellation.
const maxReasonChars = 500

// ValidateReason returns an *InvalidError for a reason of an operator's cancellation that is not 1 to 500 characters
// of UTF-8 without control characters, or has only characters that nobody sees.
func ValidateReason(reason string) error { return ValidateText("reason", reason, maxReasonChars) }

// Filter selects orders. Empty members select all.
type Filter struct {
	User   string
	Sale   uuid.UUID
	Status Status
}

// ErrTooWide is returned for a list of the orders of all users in all sales.
var ErrTooWide = errors.New("a list of orders needs a user or a sale")

// Recorded are the statuses that an order can have in Postgres.
func Recorded() []Status {
	return []Status{
		StatusConfirmed, StatusPaid, StatusCancelled, StatusExpired, StatusRejected, StatusVoided,
	}
}

// Placed is an order with its place in its sale, as operators see it.
type Placed struct {
	Order
	// Sequence is the order's place in its sale, and Epoch the epoch of the sale's stock in which it was given out.
	Sequence, Epoch int64
}

// Logged is an event of an order as its log has it.
type Logged struct {
	// Version is the version of the order after the event.
	Version    int
	Type       EventType
	OccurredAt time.Time
	// Data is a JSON object.
	Data []byte
}
