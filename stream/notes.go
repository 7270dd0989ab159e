package stream

import (
	"context"
	"sync/atomic"
)

// notes are what the subscriber and the handler of a message tell each other: watermill has no place
// for it. They belong to the handler until it acks or nacks, and to the subscriber afterwards.
type notes struct {
	// page counts the messages of the page that have not arrived; nil for a message delivered alone.
	page *atomic.Int64
	// refusal is why the handler refuses the message, for the dead letter.
	refusal error
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
