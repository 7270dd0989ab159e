package batch

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/internal/tracing"
	"stampede/reservation/order"
	"stampede/stream"
)

// Handle is the Router's handler. It returns nil when every order of the message is final in Postgres
// and the units of refused orders are back in the sale. It returns stream.OrderErrors if orders
// cannot be recorded (ledger.ErrContradiction, or an error of Postgres about their values); all
// others of the message are done then. Those and order.ErrUndecodable recur with every delivery.
// stream.ErrStopping and stream.ErrDeferred are no fault of the message.
func (b *Batcher) Handle(msg *message.Message) error {
	err := b.handle(msg)
	if err != nil {
		stream.NoteRefusal(msg.Context(), err)
	}
	return err
}

func (b *Batcher) handle(msg *message.Message) error {
	moreFollow := stream.NoteArrival(msg.Context())
	events, err := order.DecodeReserved(msg)
	if err != nil {
		return fmt.Errorf("message %s: %w", msg.UUID, err)
	}
	d, orders := newDelivery(events)
	d.entry = msg.Metadata.Get(order.MetaEntryID)
	if b.Tracer != nil {
		stream.NoteAcked(msg.Context(), d.endAcks)
	}
	if !b.queue.add(orders, moreFollow) {
		return stream.ErrStopping
	}
	return <-d.done
}

// delivery is a message whose orders are not all done.
type delivery struct {
	done  chan error // receives one value
	entry string     // the id of the message in its stream
	// arrived is when the handler got it.
	arrived time.Time

	mu   sync.Mutex
	open int // orders that are not done
	// postponed is why orders are left to a later delivery, if any are.
	postponed error
	// refused are the orders that cannot be recorded.
	refused stream.OrderErrors
	// acks are the spans of its traced orders until it is acknowledged.
	acks []tracing.Span
}

// submission is an order of a message that waits for its batch. It belongs to one goroutine at a time.
type submission struct {
	event    order.OrderReserved
	delivery *delivery    // nil once resolved
	span     tracing.Span // of the batch in which it is now
	// waits is since when it waits for a batch, if it is traced.
	waits time.Time
}

func newDelivery(events []order.OrderReserved) (*delivery, []*submission) {
	d := &delivery{done: make(chan error, 1), arrived: time.Now(), open: len(events)}
	orders := make([]submission, len(events))
	waiting := make([]*submission, len(events))
	for i, event := range events {
		orders[i] = submission{event: event, delivery: d}
		waiting[i] = &orders[i]
	}
	return d, waiting
}

// resolve ends the order's part of its message; only the first call counts.
func (s *submission) resolve(err error) {
	d := s.delivery
	if d == nil {
		return
	}
	s.delivery = nil
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, stream.ErrStopping), errors.Is(err, stream.ErrDeferred):
		d.postponed = err
	default:
		d.refused = append(d.refused, stream.OrderError{OrderID: s.event.OrderID, Err: err})
	}
	if d.open--; d.open > 0 {
		return
	}
	switch {
	case d.postponed != nil:
		d.done <- d.postponed
	case d.refused != nil:
		d.done <- d.refused
	default:
		d.done <- nil
	}
}
