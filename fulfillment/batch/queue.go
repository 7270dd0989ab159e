package batch

import (
	"sync"
	"time"
)

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
