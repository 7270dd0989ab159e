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

// submissions are orders that wait for a batch, at most as many as the subscriber holds. Every
// submission that was added is resolved.
type submissions struct {
	// full has a value when at least want submissions wait.
	full chan struct{}

	// pageWait bounds awaitPage.
	pageWait time.Duration

	mu      sync.Mutex
	waiting []*submission
	want    int
	// moreFollow is set while a page is being delivered. awaitsPage makes its end signal full.
	moreFollow, awaitsPage bool
	closed                 bool
}

// pageWait is much longer than the delivery of a page takes.
const pageWait = time.Millisecond

func newSubmissions() *submissions {
	return &submissions{full: make(chan struct{}, 1), want: 1, pageWait: pageWait}
}

// add adds the orders of a message. It returns false after close.
func (q *submissions) add(orders []*submission, moreFollow bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.waiting = append(q.waiting, orders...)
	q.moreFollow = moreFollow
	q.signal()
	return true
}

// signal requires mu.
func (q *submissions) signal() {
	if len(q.waiting) >= q.want || q.awaitsPage && !q.moreFollow {
		select {
		case q.full <- struct{}{}:
		default:
		}
	}
}

// signalAt makes full signal when n orders wait, and drops a signal for another number: waking the
// batcher for every message would cost more than handling the message.
func (q *submissions) signalAt(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-q.full:
	default:
	}
	q.want = n
	q.signal()
}

// awaitPage waits until the messages of a page that is being delivered are here, or n orders. A page
// would become two batches or more otherwise. A message that does not come costs pageWait.
func (q *submissions) awaitPage(n int) {
	q.mu.Lock()
	if !q.moreFollow || len(q.waiting) >= n {
		q.mu.Unlock()
		return
	}
	select {
	case <-q.full:
	default:
	}
	q.want, q.awaitsPage = n, true
	q.mu.Unlock()
	timer := time.NewTimer(q.pageWait)
	defer timer.Stop()
	select {
	case <-q.full:
	case <-timer.C:
	}
	q.mu.Lock()
	q.awaitsPage = false
	q.mu.Unlock()
}

// take returns up to limit submissions, oldest first.
func (q *submissions) take(limit int) []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(limit, len(q.waiting))
	taken := q.waiting[:n:n]
	if q.waiting = q.waiting[n:]; len(q.waiting) == 0 {
		q.waiting = nil // otherwise its capacity would shrink from the front and be reallocated often
	}
	return taken
}

// close returns the waiting submissions, and makes add refuse further ones.
func (q *submissions) close() []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.waiting
	q.waiting, q.closed = nil, true
	return left
}
