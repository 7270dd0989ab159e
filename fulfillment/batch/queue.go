package batch

import (
	"fmt"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/fulfillment/stream"
	"stampede/reservation/order"
)

// submission is a message that waits for its batch.
type submission struct {
	msg *message.Message
	// event is the decoded message, after the batcher has read it.
	event order.OrderReserved
	// done has room for one value, so that it never blocks the batcher.
	done chan error
}

// resolve passes the result to the waiting handler; only the first call counts.
func (s *submission) resolve(err error) {
	select {
	case s.done <- err:
	default:
	}
}

// submissions are messages that wait for a batch. There are at most as many as waiting handlers,
// and so as entries that the subscriber holds. Every submission that was added is resolved.
type submissions struct {
	// full has a value when at least want submissions wait.
	full chan struct{}

	mu      sync.Mutex
	waiting []*submission
	want    int
	closed  bool
}

func newSubmissions() *submissions { return &submissions{full: make(chan struct{}, 1), want: 1} }

// add returns false after close.
func (q *submissions) add(s *submission) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.waiting = append(q.waiting, s)
	q.signal()
	return true
}

// signal requires mu.
func (q *submissions) signal() {
	if len(q.waiting) >= q.want {
		select {
		case q.full <- struct{}{}:
		default:
		}
	}
}

// signalAt makes full signal when n messages wait, and drops a signal for another number: waking the
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

// Handle is the Router's handler. It returns nil when the order of the message is final in Postgres
// and the units of a rejected order are back in the sale. An error of the message itself
// (order.ErrUndecodable, an unknown sale, ledger.ErrContradiction, or an error of Postgres about its
// values) recurs with every delivery; stream.ErrStopping is no fault of the message.
//
// Each message has its own goroutine here, which only waits. The batcher decodes all messages on its
// own stack, so that the stacks of these goroutines need not grow.
func (b *Batcher) Handle(msg *message.Message) error {
	s := &submission{msg: msg, done: make(chan error, 1)}
	err := error(stream.ErrStopping)
	if b.queue.add(s) {
		err = <-s.done
	}
	if err != nil {
		stream.NoteRefusal(msg.Context(), err)
	}
	return err
}

// decode decodes the messages, resolves the undecodable ones, and returns the others.
func decode(batch []*submission) []*submission {
	return slices.DeleteFunc(batch, func(s *submission) bool {
		var err error
		if s.event, err = order.DecodeReserved(s.msg); err != nil {
			s.resolve(fmt.Errorf("message %s: %w", s.msg.UUID, err))
		}
		return err != nil
	})
}
