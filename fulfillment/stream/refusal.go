package stream

import (
	"context"
)

// refusal is where a handler leaves why it refused a message, because watermill's Nack says nothing:
// an operator who finds the dead letter wants to know. It belongs to the handler until the nack, and to
// the subscriber afterwards.
type refusal struct{ err error }

type refusalKey struct{}

func withRefusal(ctx context.Context, r *refusal) context.Context {
	return context.WithValue(ctx, refusalKey{}, r)
}

// NoteRefusal is for the handler of a message with this context. It does nothing for one of another subscriber.
func NoteRefusal(ctx context.Context, err error) {
	if r, ok := ctx.Value(refusalKey{}).(*refusal); ok {
		r.err = err
	}
}
