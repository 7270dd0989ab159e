package batch

import (
	"fmt"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/fulfillment/stream"
	"stampede/reservation/order"
)

// submission is a message that waits for its batch. done takes one value and never blocks the batcher.
type submission struct {
	Msg *message.Message
	// Event is what the message says, once the batcher has read it.
	Event order.OrderReserved
	Done  chan error
}

// resolve tells the waiting handler; only the first time counts.
func (s *submission) resolve(err error) {
	select {
	case s.Done <- err:
	default:
	}
}

// submissions are those that nobody works on yet. There are never more than handlers that wait, and of them never
// more than entries that the subscriber holds. Every one that is added is resolved.
type submissions struct {
	// full has a value when there are as many as await was told, or more.
	full chan struct{}

	mu      sync.Mutex
	waiting []*submission
	want    int
	closed  bool
}

func newSubmissions() *submissions { return &submissions{full: make(chan struct{}, 1), want: 1} }

// Add is false if nobody takes any more.
func (q *submissions) Add(s *submission) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.waiting = append(q.waiting, s)
	q.signal()
	return true
}

// signal needs mu.
func (q *submissions) signal() {
	if len(q.waiting) >= q.want {
		select {
		case q.full <- struct{}{}:
		default:
		}
	}
}

// await has full tell when there are so many. What it told for another number is forgotten: to wake
// the batcher for each message that it does not want yet would cost more than the message.
func (q *submissions) await(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-q.full:
	default:
	}
	q.want = n
	q.signal()
}

// take returns up to so many, those first that came first.
func (q *submissions) take(most int) []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(most, len(q.waiting))
	taken := q.waiting[:n:n]
	if q.waiting = q.waiting[n:]; len(q.waiting) == 0 {
		q.waiting = nil // or the room for it would shrink from the front and be made anew for every few
	}
	return taken
}

func (q *submissions) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// close returns what is left, and takes nothing from then on.
func (q *submissions) close() []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.waiting
	q.waiting, q.closed = nil, true
	return left
}

// Handle is the Router's handler. It returns nil when the order of the message has its end in
// Postgres and, if that was a refusal, its units are back in the sale. An error of the message itself
// (reservation.ErrUndecodable, ErrUnknownSale, ErrContradiction, or what Postgres says of its values)
// comes back with every delivery; ErrStopping is no fault of the message.
//
// There is a handler for each message, and so it does nothing but wait: the batcher reads the messages, on one
// stack that has its size, where each handler's would have to grow for it.
func (b *Batcher) Handle(msg *message.Message) error {
	s := &submission{Msg: msg, Done: make(chan error, 1)}
	err := error(stream.ErrStopping)
	if b.Queue.Add(s) {
		err = <-s.Done
	}
	if err != nil {
		stream.NoteRefusal(msg.Context(), err)
	}
	return err
}

// read reads the messages, and resolves those that are no events. It returns the others.
func read(batch []*submission) []*submission {
	return slices.DeleteFunc(batch, func(s *submission) bool {
		var err error
		if s.Event, err = order.DecodeReserved(s.Msg); err != nil {
			s.resolve(fmt.Errorf("message %s: %w", s.Msg.UUID, err))
		}
		return err != nil
	})
}
