package stream

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/uuid"
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

// refusal is where a handler leaves its reason to refuse a message, for the dead letter:
// watermill's Nack carries none. It belongs to the handler until the nack, and to the subscriber
// afterwards.
type refusal struct{ err error }

type refusalKey struct{}

func withRefusal(ctx context.Context, r *refusal) context.Context {
	return context.WithValue(ctx, refusalKey{}, r)
}

// NoteRefusal records why the handler of a message with this context refuses it. It does nothing
// for another subscriber's message.
func NoteRefusal(ctx context.Context, err error) {
	if r, ok := ctx.Value(refusalKey{}).(*refusal); ok {
		r.err = err
	}
}
