package lock

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// waitState holds the waiters, in one queue for each key. Only the first of a queue asks Redis, so a
// release wakes one waiter and not all. Guarded by Locker.mu.
type waitState struct {
	queues    map[string]*queue
	listeners map[string]*listener // by the name that listenerOf returns
	// channels counts the subscriptions to each channel whose end Redis has not confirmed: until
	// then Redis may count this process as a listener. ended holds channels whose count fell to 0,
	// with the newest serial at that time: the answer to an earlier release may still count this
	// process.
	channels map[string]int
	ended    map[string]uint64
	// yields holds until when a key without waiters here is left to other processes that were
	// notified of its release.
	yields map[string]time.Time
	yield  time.Duration // for one other process
}

func newWaiting(yield time.Duration) waitState {
	return waitState{
		yield:  yield,
		queues: make(map[string]*queue), listeners: make(map[string]*listener, 1),
		channels: make(map[string]int), ended: make(map[string]uint64), yields: make(map[string]time.Time),
	}
}

// queue is never empty.
type queue struct {
	key     string
	waiters []*waiter
	// releasedHere is set while a release by this process is in progress, until its message arrives.
	releasedHere bool
	// listeners is how many connections, with that of this process, listened for the release at the
	// last attempt or release here; 0 if unknown.
	listeners int
}

// waiter is one waiting Acquire.
type waiter struct {
	owner *lockOwner
	queue *queue // nil if it is in none
	// ask is set when the waiter should ask Redis now. askAt is when it should ask at the latest,
	// zero unless it is the first of its queue.
	ask   bool
	askAt time.Time
	wake  chan struct{} // receives after a change of ask or askAt
}

func newWaiter(o *lockOwner) *waiter { return &waiter{owner: o, wake: make(chan struct{}, 1)} }

// joinQueue appends the waiter to the queue of a key, unless it is already there, and reports
// whether it is the first. The first asks again when the lock is released, after WithPoll, or when
// within has passed, in which the lock ends unless it is renewed. listeners is how many connections
// listen for the release, 0 if unknown.
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
		// If its owner got the lock meanwhile, it must not wait for its own release.
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

// recheckAfter is how long a waiter sleeps without a message if the lock lasts for the given time;
// 0 if that is unknown.
func (l *Locker) recheckAfter(lasts time.Duration) time.Duration {
	if lasts <= 0 || lasts > l.poll {
		return l.poll
	}
	return lasts
}

// wait returns nil when the waiter should ask for the lock again.
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

// leaveQueue is called by a waiter that got a lease or gives up.
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

// unqueue removes a waiter from its queue. If it was the first, the next one asks: after the lease
// if the lock was taken, and immediately otherwise. Callers hold mu.
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

// askNow requires mu.
func (w *waiter) askNow() {
	w.ask = true
	signal(w.wake)
}

// askBy makes the waiter ask at that time, or earlier if that was planned. Callers hold mu.
func (w *waiter) askBy(at time.Time) {
	if w.askAt.IsZero() || at.Before(w.askAt) {
		w.askAt = at
		signal(w.wake)
	}
}

// signal wakes the receiver of a channel of size one.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // it is already signalled
	}
}

// wakeFirst requires mu.
func (ws *waitState) wakeFirst(key string) {
	if q := ws.queues[key]; q != nil {
		q.waiters[0].askNow()
	}
}

// wakeOwner wakes the waiters of the owner that just got the lock: they share it. Callers hold mu.
func (ws *waitState) wakeOwner(key string, o *lockOwner) {
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

// wakeAll requires mu.
func (ws *waitState) wakeAll() {
	for _, q := range ws.queues {
		for _, w := range q.waiters {
			w.askNow()
		}
	}
}
