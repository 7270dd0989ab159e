package order

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

// This file decides which transition of an order is legal; package ledger writes it.
// docs/architecture.md lists them.

// EventType is the name of an event of an order. EventReserved is a part of an entry of the stream, and then of the row
// of order_events that holds its outcome; every other event is the type of a row.
type EventType string

// The events of an order. The script appends EventReserved; all others are decided in Postgres.
const (
	EventReserved  EventType = "OrderReserved"
	EventConfirmed EventType = "OrderConfirmed"
	EventRejected  EventType = "OrderRejected"
	EventVoided    EventType = "OrderVoided"
	EventPaid      EventType = "OrderPaid"
	EventCancelled EventType = "OrderCancelled"
	EventExpired   EventType = "OrderExpired"
)

// statusNone is the status before the first event.
const statusNone Status = ""

// transitions holds every legal transition: status, event, next status.
var transitions = map[Status]map[EventType]Status{
	statusNone:     {EventReserved: StatusReserved},
	StatusReserved: {EventConfirmed: StatusConfirmed, EventRejected: StatusRejected, EventVoided: StatusVoided},
	// Without a payment window confirmed is final, except for operators and for money (Order.after, Order.Paid).
	StatusConfirmed: {EventPaid: StatusPaid, EventCancelled: StatusCancelled, EventExpired: StatusExpired},
	// Only by an operator (Order.Withdrawn).
	StatusPaid: {EventCancelled: StatusCancelled},
}

var (
	// ErrIllegalTransition is wrapped by a *TransitionError, the error for a change that does not
	// fit the order's status.
	ErrIllegalTransition = errors.New("the order's status does not allow this")
	// ErrNotConfirmed is returned for a change of an order that Redis has accepted and
	// Postgres has not recorded yet. A retry shortly after is safe.
	ErrNotConfirmed = errors.New("order not confirmed yet")
	// ErrExpired is returned for a change of an order after its payment deadline, recorded or
	// not.
	ErrExpired = errors.New("the time to pay for the order is over")
	// ErrDamaged is returned for a change that does not fit the stored order or sale. Nothing
	// was done, and retries do not help: an operator has to inspect it.
	ErrDamaged = errors.New("the stored order is damaged")
)

// TransitionError names the event that the status does not allow. It wraps ErrIllegalTransition.
type TransitionError struct {
	Status Status
	Event  EventType
}

func (e *TransitionError) Error() string {
	return fmt.Sprintf("%v: no %s after %s", ErrIllegalTransition, e.Event, e.Status)
}

// Unwrap returns ErrIllegalTransition.
func (e *TransitionError) Unwrap() error { return ErrIllegalTransition }

// AlreadyPaidError is returned for a payment of an order that was paid with another reference: the
// new payment must be refunded. It wraps ErrIllegalTransition.
type AlreadyPaidError struct {
	// Reference is the reference of the valid payment.
	Reference string
}

func (e *AlreadyPaidError) Error() string {
	return fmt.Sprintf("%v: it was paid with reference %q", ErrIllegalTransition, e.Reference)
}

// Unwrap returns ErrIllegalTransition.
func (e *AlreadyPaidError) Unwrap() error { return ErrIllegalTransition }

// After returns the status that the event leads to; false if it cannot happen to an order with this status.
func (s Status) After(e EventType) (Status, bool) {
	to, ok := transitions[s][e]
	return to, ok
}

// LastVersion is the highest version that an order can have: every step makes one.
func LastVersion() int { return lastVersion }

var lastVersion = mostSteps(statusNone)

func mostSteps(from Status) (most int) {
	for _, to := range transitions[from] {
		most = max(most, 1+mostSteps(to))
	}
	return most
}

// Histories returns the status after each series of events that the log of an order can have. The types of the events
// are separated by blanks.
func Histories() map[string]Status {
	all := map[string]Status{}
	addHistories(all, StatusReserved, "")
	return all
}

func addHistories(all map[string]Status, from Status, before string) {
	for event, to := range transitions[from] {
		history := strings.TrimSpace(before + " " + string(event))
		all[history] = to
		addHistories(all, to, history)
	}
}

// Live is true if the order holds units in Postgres: they count in the sale's sold, and its user
// can have no other live order in the sale.
func (s Status) Live() bool { return s == StatusConfirmed || s == StatusPaid }

// Ended is true if nothing further happens to the order by itself or by its buyer. An operator can still cancel one
// that is Live, which is rare: nobody waits for it.
func (o Order) Ended() bool {
	return len(transitions[o.Status]) == 0 || o.Status == StatusPaid || o.isFinal()
}

// isFinal is true if the order is confirmed and there is nothing to pay.
func (o Order) isFinal() bool { return o.Status == StatusConfirmed && o.ExpiresAt.IsZero() }

// DecidePayment decides about money for the order. It returns the order after the payment, or why the money is due for
// refund. overdue is true after the deadline and the grace. An order without a deadline takes money at any time.
// Money that the order was paid with before is a repeat, which the caller has to recognize by its reference.
func (o Order) DecidePayment(m Money, overdue bool) (paid Order, due PaymentReason) {
	switch o.Status {
	case StatusPaid:
		return Order{}, RefundAlreadyPaid
	case StatusCancelled:
		return Order{}, RefundOrderCancelled
	case StatusRejected:
		return Order{}, RefundOrderRejected
	case StatusVoided:
		return Order{}, RefundOrderVoided
	}
	to, ok := o.Status.After(EventPaid)
	switch {
	case !ok || overdue:
		return Order{}, RefundOrderExpired
	case m.Unreadable != "", o.Amount > 0 && (m.Amount != o.Amount || m.Currency != o.Currency):
		return Order{}, RefundAmountMismatch
	}
	return o.changed(to), ""
}

// Refusal returns what a buyer is told of a payment that is due for refund: ErrExpired, an *AlreadyPaidError or a
// *TransitionError.
func (o Order) Refusal(due PaymentReason) error {
	switch due {
	case RefundOrderExpired:
		return ErrExpired
	case RefundAlreadyPaid:
		return &AlreadyPaidError{o.PaymentReference}
	default:
		return &TransitionError{o.Status, EventPaid}
	}
}

// Cancelled returns the order after its buyer's cancellation; changed is false if it was cancelled before. An entry can
// be cancelled although there is nothing to pay, until the entries of its draw close: for the caller to look at.
// The error is a *TransitionError or ErrExpired.
func (o Order) Cancelled(overdue bool) (cancelled Order, changed bool, err error) {
	if o.Status == StatusCancelled {
		return o, false, nil
	}
	if o.Status == StatusPaid {
		return Order{}, false, &TransitionError{o.Status, EventCancelled}
	}
	if o.isFinal() && o.EntryFor != uuid.Nil {
		return o.changed(StatusCancelled), true, nil
	}
	cancelled, err = o.before(EventCancelled, overdue)
	return cancelled, err == nil, err
}

// Withdrawn returns the order after its cancellation by an operator, which is possible as long as it is Live: also when
// it is paid, when confirmed is final, and when its deadline has passed and its expiry is not recorded. changed is
// false if it was cancelled before. It keeps the reference of its payment, which has to be refunded. The error is a
// *TransitionError.
func (o Order) Withdrawn() (cancelled Order, changed bool, err error) {
	if o.Status == StatusCancelled {
		return o, false, nil
	}
	to, ok := o.Status.After(EventCancelled)
	if !ok {
		return Order{}, false, &TransitionError{o.Status, EventCancelled}
	}
	return o.changed(to), true, nil
}

// Expired returns the overdue order after its expiry. The error is a *TransitionError.
func (o Order) Expired() (Order, error) { return o.after(EventExpired) }

// before is like after, for events that are possible only before the deadline.
func (o Order) before(e EventType, overdue bool) (Order, error) {
	next, err := o.after(e)
	if o.Status == StatusExpired || err == nil && overdue {
		return Order{}, ErrExpired
	}
	return next, err
}

// after returns the order after the event, or a *TransitionError.
func (o Order) after(e EventType) (Order, error) {
	to, ok := o.Status.After(e)
	if !ok || o.isFinal() {
		return Order{}, &TransitionError{o.Status, e}
	}
	return o.changed(to), nil
}

// changed returns the next version of the order.
func (o Order) changed(to Status) Order {
	o.Status, o.ExpiresAt = to, time.Time{}
	o.Version++
	return o
}
