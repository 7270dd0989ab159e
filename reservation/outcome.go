package reservation

import (
	"errors"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Verdict is the script's answer to one request, in its own word. A refusal is an answer, not an error.
type Verdict string

// The verdicts of lua/reserve.lua, in the order of its checks.
const (
	// Reserved: the unit is the buyer's, and the event is in the stream.
	Reserved Verdict = "reserved"
	// Replayed: this very request was answered Reserved before; Answer.Reservation is the first one.
	Replayed Verdict = "replayed"
	// OrderEnded: this very request made an order that has ended; see Answer.Reservation and
	// Answer.Status.
	OrderEnded Verdict = "order-ended"
	// KeyReused: the buyer's reservation was made with the same idempotency key and another quantity.
	KeyReused Verdict = "key-reused"
	// AlreadyPurchased: the buyer holds a reservation in this sale; Answer.Reservation is that one.
	AlreadyPurchased Verdict = "already-purchased"
	// Paused: an operator halted the sale.
	Paused Verdict = "paused"
	// Ended: the sale was ended, or its closing time has passed.
	Ended Verdict = "ended"
	// NotOpen: the opening time, Answer.OpensAt, has not come.
	NotOpen Verdict = "not-open"
	// OverLimit: more units than one order may hold; Answer.Limit says how many.
	OverLimit Verdict = "over-limit"
	// SoldOut: fewer units are left than were asked for.
	SoldOut Verdict = "sold-out"
	// UnknownSale: Redis holds no such sale.
	UnknownSale Verdict = "unknown-sale"
)

var (
	// ErrOverloaded is returned when too many requests wait for Redis, or this one has waited for too
	// long. Nothing was reserved.
	ErrOverloaded = errors.New("too many reservations are waiting")
	// ErrUnavailable is returned when Redis could not be asked, or refused to work. Nothing was reserved.
	ErrUnavailable = errors.New("the sale cannot be reached")
	// ErrReservationDamaged is returned when what Redis has stored of the buyer cannot be read.
	// Nothing was reserved, and trying again does not help until the sale is rebuilt.
	ErrReservationDamaged = errors.New("what is stored of the buyer is damaged")
	// ErrOutcomeUnknown is returned when the request may have reached Redis and no answer came back
	// in all tries, or the caller gave up after it was sent. The buyer may hold a reservation: the
	// same request with the same idempotency key finds out, and cannot reserve twice.
	ErrOutcomeUnknown = errors.New("the outcome of the reservation is unknown")
)

// Request asks for units of one sale for one user.
type Request struct {
	Sale uuid.UUID
	// User is the buyer's id, as ValidateUser accepts it.
	User string
	// IdempotencyKey is the client's name for this purchase, at most 255 bytes; empty for none.
	IdempotencyKey string
	// Quantity is how many units, at least 1.
	Quantity int64
}

// Answer is the outcome of a request.
type Answer struct {
	Verdict Verdict
	// Reservation is set for Reserved, Replayed and AlreadyPurchased. For OrderEnded its OrderID and Quantity are.
	Reservation order.Reservation
	// Status is set for OrderEnded: cancelled, expired or rejected.
	Status order.Status
	// OpensAt is set for NotOpen.
	OpensAt time.Time
	// Limit is set for OverLimit.
	Limit int64
}
