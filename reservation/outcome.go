package reservation

import (
	"errors"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Verdict is the word of lua/reserve.lua for its answer to one request. A refusal is an answer, not an error.
type Verdict string

// The verdicts of lua/reserve.lua, in the order of its checks.
const (
	// Reserved: the buyer has the units, and the event is in the stream.
	Reserved Verdict = "reserved"
	// Replayed: the same request was answered Reserved before; Answer.Reservation is the first one.
	Replayed Verdict = "replayed"
	// OrderEnded: the same request made an order that has ended; see Answer.Reservation and
	// Answer.Status.
	OrderEnded Verdict = "order-ended"
	// Withdrawn: the request is an Offer, and Withdraw came before.
	Withdrawn Verdict = "withdrawn"
	// KeyReused: the buyer's reservation was made with the same idempotency key and another quantity.
	KeyReused Verdict = "key-reused"
	// AlreadyPurchased: the buyer holds Answer.Reservation in this sale.
	AlreadyPurchased Verdict = "already-purchased"
	// Paused: an operator halted the sale.
	Paused Verdict = "paused"
	// OffersOnly: the units of the sale are offered to entrants (Store.Offer).
	OffersOnly Verdict = "offers-only"
	// Retired: the sale has ended, and its buyers are only in Postgres, which knows the answer.
	Retired Verdict = "retired"
	// Ended: the sale was ended, or its closing time has passed.
	Ended Verdict = "ended"
	// NotOpen: the sale opens at Answer.OpensAt.
	NotOpen Verdict = "not-open"
	// OverLimit: more units than one order may hold, which are Answer.Limit.
	OverLimit Verdict = "over-limit"
	// SoldOut: fewer units are left than requested, in a sale with items of the items Answer.Of.Codes.
	SoldOut Verdict = "sold-out"
	// UnknownItem: the sale has no item with the codes Answer.Of.Codes.
	UnknownItem Verdict = "unknown-item"
	// UnknownSale: Redis has no such sale.
	UnknownSale Verdict = "unknown-sale"
)

var (
	// ErrOverloaded is returned when too many requests wait for Redis, or this one has waited too
	// long, or its client has left. Nothing was reserved.
	ErrOverloaded = errors.New("too many reservations are waiting")
	// ErrUnavailable is returned when Redis could not be reached or refused the call. Nothing was reserved.
	ErrUnavailable = errors.New("the sale cannot be reached")
	// ErrReservationDamaged is returned when the buyer's reservation in Redis cannot be read.
	// Nothing was reserved, and retries do not help until the sale is rebuilt.
	ErrReservationDamaged = errors.New("the stored reservation of the buyer is damaged")
	// ErrOutcomeUnknown is returned when the request may have reached Redis and no try got an answer,
	// or when ctx ended after it was sent. The buyer may hold a reservation: a retry with the same
	// idempotency key returns the outcome and cannot reserve twice.
	ErrOutcomeUnknown = errors.New("the outcome of the reservation is unknown")
)

// Request asks for units of one sale for one user.
type Request struct {
	Sale uuid.UUID
	// User is the buyer's id, as ValidateUser accepts it.
	User string
	// IdempotencyKey identifies the purchase in retries; at most 255 bytes, empty for none.
	IdempotencyKey string
	// Quantity is the number of units, at least 1; 0 with Items.
	Quantity int64
	// Items are the units by code, of a sale with items.
	Items map[string]int64
	// Arrived is when the request came, of a monotonic clock; the zero time is that of the call of Reserve.
	Arrived time.Time
	// Client waits for the answer. It may be nil.
	Client Client
}

// Client is who sent a request.
type Client interface {
	// HasLeft reports whether the client no longer waits for an answer. It is asked seldom, and must not block.
	HasLeft() bool
}

// Answer is the outcome of a request.
type Answer struct {
	Verdict Verdict
	// Reservation is set for Reserved, Replayed and AlreadyPurchased; for OrderEnded only its OrderID and Quantity.
	Reservation order.Reservation
	// Status is set for OrderEnded: cancelled, expired or rejected.
	Status order.Status
	// OpensAt is set for NotOpen.
	OpensAt time.Time
	// Limit is set for OverLimit.
	Limit int64
	// Of is what the answer says of items; nil for nothing, and in a sale without items.
	Of *OfItems
}

// OfItems is what an answer says of the items of a sale. It must not be changed.
type OfItems struct {
	// Units are the reservation's Lines by code; for SoldOut what is left of each item of the sale, if that is known.
	Units order.Items
	// Codes are the items that fewer units are left of than requested (SoldOut), that the sale does not have
	// (UnknownItem), or the one whose limit it is (OverLimit).
	Codes []string
}
