package stream

import (
	"context"
)

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
