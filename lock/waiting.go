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
}

func newWaiting() waiting {
	return waiting{queues: make(map[string]*queue), listeners: make(map[string]*listener, 1)}
}

// queue is never empty.
type queue struct {
	key     string
	waiters []*waiter
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

func (w *waiter) rouse() {
	select {
	case w.wake <- struct{}{}:
	default: // it is being woken
	}
}

// askNow needs mu.
func (w *waiter) askNow() {
	w.ask = true
	w.rouse()
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

// acquire asks until it gets all.
func (l *Locker) acquire(ctx context.Context, a asking) (*Lease, error) {
	var w *waiter
	if key, ahead := l.othersWait(a); ahead {
		w = &waiter{owner: a.owner, wake: make(chan struct{}, 1)}
		if err := l.wait(ctx, w, key, 0); err != nil {
			return nil, err
		}
	}
	for {
		got, err := l.attempt(ctx, a)
		if err != nil || len(got.busy) == 0 {
			l.leaveQueue(w, got.lease)
			return got.lease, err
		}
		if w == nil {
			w = &waiter{owner: a.owner, wake: make(chan struct{}, 1)}
		}
		if err := l.wait(ctx, w, got.busy[0], got.wait); err != nil {
			return nil, err
		}
	}
}

// othersWait tells whether somebody waits already for a key that is asked for, and so comes first. An
// owner that holds a key already does not stand behind those who wait for it to be released.
func (l *Locker) othersWait(a asking) (key string, ahead bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.waiting.queues) == 0 {
		return "", false
	}
	for _, k := range a.keys {
		if a.owner.holds[k] != nil {
			continue
		}
		if l.waiting.queues[k] != nil {
			return k, true
		}
	}
	return "", false
}

// wait returns nil when it is time to ask for the lock again: when it was released, or after the given
// time, in which it ends if nobody renews it, or when the poll is due.
func (l *Locker) wait(ctx context.Context, w *waiter, key string, within time.Duration) error {
	l.joinQueue(w, key, within)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		l.mu.Lock()
		if w.ask || l.closed {
			w.ask = false
			l.mu.Unlock()
			return nil
		}
		sleep := MaxLease
		if !w.askAt.IsZero() {
			sleep = time.Until(w.askAt)
			if sleep <= 0 {
				w.askAt = time.Time{}
				l.mu.Unlock()
				return nil
			}
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

// joinQueue puts the waiter into the queue of a key, at its end unless it stands there already.
func (l *Locker) joinQueue(w *waiter, key string, within time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.queue == nil || w.queue.key != key {
		l.unqueue(w, 0)
		q := l.waiting.queues[key]
		if q == nil {
			q = &queue{key: key}
			l.waiting.queues[key] = q
			l.listenTo(key)
		}
		q.waiters = append(q.waiters, w)
		w.queue, w.ask = q, false
	}
	if w.queue.waiters[0] == w {
		w.askAt = time.Now().Add(l.patience(within))
	}
}

// patience is how long a waiter sleeps that nobody wakes while a lock lasts that long, or longer if it is
// renewed; 0 if it is not known how long.
func (l *Locker) patience(lasts time.Duration) time.Duration {
	if lasts <= 0 || lasts > l.poll {
		return l.poll
	}
	return lasts
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
		l.listenTo(q.key)
	case first && taken > 0:
		q.waiters[0].askAt = time.Now().Add(l.patience(taken))
		q.waiters[0].rouse()
	case first:
		q.waiters[0].askNow()
	}
}
