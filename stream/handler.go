package stream

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/google/uuid"
)

// notes carry what the subscriber and the handler of a message exchange: a message of watermill has no
// place for it. They belong to the handler until it acks or nacks, and to the subscriber afterwards.
type notes struct {
	// page counts the messages of the page that have not arrived; nil for a message delivered alone.
	page *atomic.Int64
	// refusal is why the handler refuses the message, for the dead letter.
	refusal error
	// acked is called when Redis has the ack, or when it was given up; it may be nil.
	acked func(sent bool)
}

type notesKey struct{}

func withNotes(ctx context.Context, n *notes) context.Context {
	return context.WithValue(ctx, notesKey{}, n)
}

// NoteArrival records that the message with this context has reached its handler. It reports whether
// messages that were read together with it are still to come, as long as the subscriber is not
// closed. Call it once for a delivery.
func NoteArrival(ctx context.Context) (moreFollow bool) {
	n, ok := ctx.Value(notesKey{}).(*notes)
	return ok && n.page != nil && n.page.Add(-1) > 0
}

// NoteRefusal records why the handler of a message with this context refuses it. It does nothing
// for another subscriber's message.
func NoteRefusal(ctx context.Context, err error) {
	if n, ok := ctx.Value(notesKey{}).(*notes); ok {
		n.refusal = err
	}
}

// NoteAcked has f called when the ack of the message with this context is sent, or given up because the subscriber
// stops. It does nothing for another subscriber's message.
func NoteAcked(ctx context.Context, f func(sent bool)) {
	if n, ok := ctx.Value(notesKey{}).(*notes); ok {
		n.acked = f
	}
}

var (
	// ErrStopping is returned for a message that was not recorded before the worker had to stop. It
	// is no fault of the message, which stays pending and is delivered again. It wraps
	// context.Canceled, which the Router does not log as a failure.
	ErrStopping = fmt.Errorf("worker is stopping: %w", context.Canceled)

	// ErrDeferred is returned for messages of blocked sales when too many of them wait. They stay
	// pending, and are claimed after a while. It is no fault of the messages, and the Router
	// does not log it as a failure.
	ErrDeferred = fmt.Errorf("too many messages of blocked sales are waiting: %w", context.Canceled)
)

// OrderErrors is returned by a handler that cannot apply these orders of a message, and has applied
// all others. Each becomes a dead letter of its own.
type OrderErrors []OrderError

// OrderError says why an order of a message cannot be applied.
type OrderError struct {
	OrderID uuid.UUID
	Err     error
}

// Error names the first few orders.
func (e OrderErrors) Error() string {
	const named = 3
	texts := make([]string, 0, named+1)
	for _, o := range e[:min(len(e), named)] {
		texts = append(texts, fmt.Sprintf("order %s: %v", o.OrderID, o.Err))
	}
	if more := len(e) - named; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns the errors of all orders.
func (e OrderErrors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, o := range e {
		errs[i] = o.Err
	}
	return errs
}
