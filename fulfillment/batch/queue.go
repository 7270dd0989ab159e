package batch

import (
	"sync"
)

// submissions are orders that wait for a batch, at most as many as the subscriber holds. Every
// submission that was added is resolved.
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
func (q *submissions) add(orders []*submission) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.waiting = append(q.waiting, orders...)
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
