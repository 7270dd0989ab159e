package lock

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// waiting is those who wait for a lock, in one queue for each key. Only the first of a queue asks Redis, so
// a release wakes one of them and not all. Guarded by Locker.mu.
type waiting struct {
	queues    map[string]*queue
	listeners map[string]*listener // by the name that listenerOf gives
	// channels are how many subscriptions to each were sent of which Redis has not said that they ended: until then
	// it may count the listener. ended are those for which that number came to 0, with the serial of the newest call
	// at that time: the listener may have been counted for a release that was sent before, and whose answer comes later.
	channels map[string]int
	ended    map[string]uint64
	// yields is until when a key for which nobody waits here is left to other processes, which heard that it was
	// released here.
	yields map[string]time.Time
	yield  time.Duration // to one process
}

func newWaiting(yield time.Duration) waiting {
	return waiting{
		yield:  yield,
		queues: make(map[string]*queue), listeners: make(map[string]*listener, 1),
		channels: make(map[string]int), ended: make(map[string]uint64), yields: make(map[string]time.Time),
	}
}

// queue is never empty.
type queue struct {
	key     string
	waiters []*waiter
	// ours is set when the lock is being released here, until its message comes.
	releasedHere bool
	// listeners is how many connections listened for the release when one of the queue asked last; 0 if it is not
	// known.
	listeners int
}

// waiter is one Acquire.
type waiter struct {
	owner *owner
	queue *queue // nil if it is in none
	// ask is set when it should ask Redis now, and askAt is when it should at the latest; zero for
	// one that is not the first of its queue.
	ask   bool
	askAt time.Time
	wake  chan struct{} // after a change of these
}

func newWaiter(o *owner) *waiter { return &waiter{owner: o, wake: make(chan struct{}, 1)} }

// joinQueue puts the waiter into the queue of a key, at its end unless it stands there already, and tells
// whether it is the first. That one asks again when the lock is released, when the poll is due, or after the
// given time, in which the lock ends if nobody renews it. It knows how many connections listen for that, or 0.
func (l *Locker) joinQueue(w *waiter, key string, within time.Duration, listeners int) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.queue == nil || w.queue.key != key {
		l.unqueue(w, 0)
		q := l.waiting.queues[key]
		if q == nil {
			q = &queue{key: key}
			l.waiting.queues[key] = q
			l.updateListener(key)
		}
		q.waiters = append(q.waiters, w)
		// Its owner may have got the lock since it was found busy, and must not wait for itself.
		w.queue, w.ask = q, w.owner != nil && w.owner.holds[key] != nil
	}
	if listeners > 0 {
		w.queue.listeners = listeners
	}
	first = w.queue.waiters[0] == w
	if first {
		w.askBy(time.Now().Add(l.recheckAfter(within)))
	}
	return first
}

// patience is how long a waiter sleeps that nobody wakes while a lock lasts that long, or longer if it is
// renewed; 0 if it is not known how long.
func (l *Locker) recheckAfter(lasts time.Duration) time.Duration {
	if lasts <= 0 || lasts > l.poll {
		return l.poll
	}
	return lasts
}

// wait returns nil when it is time for one in the queue of a key to ask for the lock again.
func (l *Locker) wait(ctx context.Context, w *waiter, key string) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		l.mu.Lock()
		sleep := MaxLease
		if !w.askAt.IsZero() {
			sleep = time.Until(w.askAt)
		}
		if w.ask || l.closed || sleep <= 0 {
			w.ask, w.askAt = false, time.Time{}
			l.mu.Unlock()
			return nil
		}
		l.mu.Unlock()
		timer.Reset(sleep)
		select {
		case <-w.wake:
		case <-timer.C:
		case <-ctx.Done():
			l.leaveQueue(w, nil)
			return fmt.Errorf("wait for lock %s: %w", key, context.Cause(ctx))
		}
	}
}

// leaveQueue is called by a waiter that got the lease, or gives up.
func (l *Locker) leaveQueue(w *waiter, got *Lease) {
	if w == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var lasts time.Duration
	if got != nil && w.queue != nil {
		if h := got.find(w.queue.key); h != nil {
			lasts = time.Until(h.ends)
		}
	}
	l.unqueue(w, lasts)
}

// unqueue takes a waiter out of its queue. The next one becomes the first: if the lock was taken for a
// while, it waits for that long, and otherwise it asks. It needs mu.
func (l *Locker) unqueue(w *waiter, taken time.Duration) {
	q := w.queue
	if q == nil {
		return
	}
	first := q.waiters[0] == w
	q.waiters = slices.DeleteFunc(q.waiters, func(other *waiter) bool { return other == w })
	w.queue, w.askAt = nil, time.Time{}
	switch {
	case len(q.waiters) == 0:
		delete(l.waiting.queues, q.key)
		l.updateListener(q.key)
	case first && taken > 0:
		q.waiters[0].askBy(time.Now().Add(l.recheckAfter(taken)))
	case first:
		q.waiters[0].askNow()
	}
}

// askNow needs mu.
func (w *waiter) askNow() {
	w.ask = true
	signal(w.wake)
}

// askBy has it ask at that time, or earlier if it was going to. It needs mu.
func (w *waiter) askBy(at time.Time) {
	if w.askAt.IsZero() || at.Before(w.askAt) {
		w.askAt = at
		signal(w.wake)
	}
}

// rouse wakes whoever sleeps on a channel that holds one value.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // it is being woken
	}
}

// wakeFirst needs mu.
func (ws *waiting) wakeFirst(key string) {
	if q := ws.queues[key]; q != nil {
		q.waiters[0].askNow()
	}
}

// wakeOwner has those ask who are of the owner that just got the lock: they share it. It needs mu.
func (ws *waiting) wakeOwner(key string, o *owner) {
	q := ws.queues[key]
	if q == nil {
		return
	}
	for _, w := range q.waiters {
		if w.owner == o {
			w.askNow()
		}
	}
}

// wakeAll needs mu.
func (ws *waiting) wakeAll() {
	for _, q := range ws.queues {
		for _, w := range q.waiters {
			w.askNow()
		}
	}
}
