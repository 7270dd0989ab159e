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
	// Event is the decoded message, once the batcher has read it.
	Event order.OrderReserved
	Done  chan error
}

// resolve answers the waiting handler; only the first call counts.
func (s *submission) resolve(err error) {
	select {
	case s.Done <- err:
	default:
	}
}

// submissions are messages that wait for a batch. There are at most as many as waiting handlers,
// and so as entries that the subscriber holds. Every submission that was added is resolved.
type submissions struct {
	// full has a value when at least as many wait as await asked for.
	full chan struct{}

	mu      sync.Mutex
	waiting []*submission
	want    int
	closed  bool
}

func newSubmissions() *submissions { return &submissions{full: make(chan struct{}, 1), want: 1} }

// Add returns false after close.
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

// await has full signal when n messages wait. A signal for another number is dropped: waking the
// batcher for every message would cost more than the message.
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

// take returns up to most submissions, oldest first.
func (q *submissions) take(most int) []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(most, len(q.waiting))
	taken := q.waiting[:n:n]
	if q.waiting = q.waiting[n:]; len(q.waiting) == 0 {
		q.waiting = nil // or its capacity would shrink from the front and be reallocated often
	}
	return taken
}

func (q *submissions) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// close returns the waiting submissions; Add refuses others from then on.
func (q *submissions) close() []*submission {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := q.waiting
	q.waiting, q.closed = nil, true
	return left
}

// Handle is the Router's handler. It returns nil when the order of the message is final in Postgres
// and the units of a refused order are back in the sale. An error of the message itself
// (reservation.ErrUndecodable, ErrUnknownSale, ErrContradiction, or an error of Postgres about its
// values) recurs with every delivery; ErrStopping is no fault of the message.
//
// Each message has its own goroutine here, which only waits: the batcher decodes all messages on
// its one stack, so that theirs need not grow.
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

// read decodes the messages, resolves those that are no events, and returns the others.
func read(batch []*submission) []*submission {
	return slices.DeleteFunc(batch, func(s *submission) bool {
		var err error
		if s.Event, err = order.DecodeReserved(s.Msg); err != nil {
			s.resolve(fmt.Errorf("message %s: %w", s.Msg.UUID, err))
		}
		return err != nil
	})
}
