package lock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// immediateAskers is about how many of the processes that receive a message ask immediately. In
	// one of twenty releases none does.
	immediateAskers = 3
	// askSpread is the time for each of the others, so that few of them ask while the lock is
	// already taken.
	askSpread = time.Millisecond
	// yieldProcessesMax bounds a yield to that many other processes.
	yieldProcessesMax = 5
	// yieldsMax bounds waiters.yields.
	yieldsMax = 1024
)

// waiters wait for locks, in one queue for each key. Only the first of a queue asks Redis, so a
// release wakes one waiter and not all. A process that released a lock leaves it to the other
// processes that listen for it: a message reaches a goroutine of this process before it wakes a
// thread of Java, so without this yield the process would give the lock to itself again and again.
//
// Methods whose comment does not say otherwise lock mu.
type waiters struct {
	*lifetime
	scripts
	settings  settings
	queues    map[string]*queue
	listeners map[string]*listener // by scripts.slot
	// channels counts the subscriptions to each channel whose end Redis has not confirmed: until
	// then Redis may count this process as a listener.
	channels map[string]int
	// yields holds until when a key without waiters here is left to other processes that were
	// notified of its release.
	yields map[string]time.Time
}

func newWaiters(lt *lifetime, s scripts, config settings) *waiters {
	return &waiters{
		lifetime: lt, scripts: s, settings: config, queues: make(map[string]*queue),
		listeners: make(map[string]*listener, 1), channels: make(map[string]int), yields: make(map[string]time.Time),
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
	wake  chan struct{} // receives after a change of ask or askAt; made with the first queue
}

// join appends the waiter to the queue of a key, unless it is already there, and reports whether it
// is the first. The first asks again when the lock is released, after WithPoll, or when within has
// passed, in which the lock ends unless it is renewed. listened is how many connections listen for
// the release, 0 if unknown.
func (ws *waiters) join(w *waiter, key string, within time.Duration, listened int) (first bool) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if w.queue == nil || w.queue.key != key {
		ws.unqueue(w, 0)
		if w.wake == nil {
			w.wake = make(chan struct{}, 1)
		}
		q := ws.queues[key]
		if q == nil {
			q = &queue{key: key}
			ws.queues[key] = q
			ws.updateListener(key)
		}
		q.waiters = append(q.waiters, w)
		// If its owner got the lock meanwhile, it must not wait for its own release.
		w.queue, w.ask = q, w.owner != nil && w.owner.holds[key] != nil
	}
	if listened > 0 {
		w.queue.listeners = listened
	}
	first = w.queue.waiters[0] == w
	if first {
		w.askBy(time.Now().Add(ws.recheckAfter(within)))
	}
	return first
}

// recheckAfter is how long a waiter sleeps without a message if the lock lasts for the given time;
// 0 if that is unknown.
func (ws *waiters) recheckAfter(lasts time.Duration) time.Duration {
	if lasts <= 0 || lasts > ws.settings.poll {
		return ws.settings.poll
	}
	return lasts
}

// wait returns nil when the waiter should ask for the lock again. After an error the waiter must leave.
func (ws *waiters) wait(ctx context.Context, w *waiter) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		ws.mu.Lock()
		sleep := MaxLease
		if !w.askAt.IsZero() {
			sleep = time.Until(w.askAt)
		}
		if w.ask || ws.closed || sleep <= 0 {
			w.ask, w.askAt = false, time.Time{}
			ws.mu.Unlock()
			return nil
		}
		key := w.queue.key
		ws.mu.Unlock()
		timer.Reset(sleep)
		select {
		case <-w.wake:
		case <-timer.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for lock %s: %w", key, context.Cause(ctx))
		}
	}
}

// leave removes a waiter that took the lock for some time, or gives up with 0.
func (ws *waiters) leave(w *waiter, taken time.Duration) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.unqueue(w, taken)
}

// unqueue removes a waiter from its queue. If it was the first, the next one asks: after the lease
// if the lock was taken, and immediately otherwise. Callers hold mu.
func (ws *waiters) unqueue(w *waiter, taken time.Duration) {
	q := w.queue
	if q == nil {
		return
	}
	first := q.waiters[0] == w
	q.waiters = slices.DeleteFunc(q.waiters, func(other *waiter) bool { return other == w })
	w.queue, w.askAt = nil, time.Time{}
	switch {
	case len(q.waiters) == 0:
		delete(ws.queues, q.key)
		ws.updateListener(q.key)
	case first && taken > 0:
		q.waiters[0].askBy(time.Now().Add(ws.recheckAfter(taken)))
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
func (ws *waiters) wakeFirst(key string) {
	if q := ws.queues[key]; q != nil {
		q.waiters[0].askNow()
	}
}

// wakeOwner wakes the waiters of the owner that just got the lock: they share it. Callers hold mu.
func (ws *waiters) wakeOwner(key string, o *lockOwner) {
	if q := ws.queues[key]; q != nil {
		for _, w := range q.waiters {
			if w.owner == o {
				w.askNow()
			}
		}
	}
}

// wakeAll requires mu.
func (ws *waiters) wakeAll() {
	for _, q := range ws.queues {
		for _, w := range q.waiters {
			w.askNow()
		}
	}
}

// onRelease wakes the first waiter of a released lock, now or later: other processes come first if
// the lock was released here. Where many processes listen, few ask immediately: Redis answers
// concurrent calls together, so the one that gets the lock would wait for the answers to the others.
// Callers hold mu.
func (ws *waiters) onRelease(key string) {
	q := ws.queues[key]
	if q == nil {
		return
	}
	w := q.waiters[0]
	here := q.releasedHere
	q.releasedHere = false
	if others := q.listeners - 1; here && others > 0 {
		w.askBy(time.Now().Add(ws.yieldTime(others)))
		return
	}
	if q.listeners <= immediateAskers || rand.IntN(q.listeners) < immediateAskers {
		w.askNow()
		return
	}
	w.askBy(time.Now().Add(rand.N(time.Duration(q.listeners) * askSpread)))
}

func (ws *waiters) yieldTime(processes int) time.Duration {
	return time.Duration(min(processes, yieldProcessesMax)) * ws.settings.yield
}

// mayListen reports which of the keys Redis may count this process for as a listener, or nil for
// none.
func (ws *waiters) mayListen(keys []string) map[string]bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(ws.channels) == 0 {
		return nil
	}
	listens := make(map[string]bool, len(keys))
	for _, key := range keys {
		listens[key] = ws.channels[releaseChannel(key)] > 0
	}
	return listens
}

// noteReleased records how many connections were notified of a release. self is set if this process
// may be among them. Waiters here know the number at the next release; an attempt, which also asks for
// it, may be long ago, as one that gets the lock learns nothing. Without waiters here, the next acquire
// comes after the other processes that were notified. Callers hold mu.
func (ws *waiters) noteReleased(key string, notified int, self bool) {
	if notified == 0 {
		return // it may be unknown
	}
	others := notified
	if self || ws.channels[releaseChannel(key)] > 0 {
		others--
	}
	if q := ws.queues[key]; q != nil {
		q.listeners = others + 1
		return
	}
	if others <= 0 {
		return
	}
	if len(ws.yields) >= yieldsMax {
		clear(ws.yields) // entries matter for milliseconds
	}
	ws.yields[key] = time.Now().Add(ws.yieldTime(others))
}

// contended returns a requested key that is left to others first: to waiters in this process or, for
// the returned time, to another process. A key that the owner holds is not left to those who wait
// for its release.
func (ws *waiters) contended(o *lockOwner, keys []string) (key string, elsewhere time.Duration) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.closed || len(ws.queues)+len(ws.yields) == 0 {
		return "", 0
	}
	for _, k := range keys {
		until, yields := ws.yields[k]
		switch {
		case o.holds[k] != nil:
		case ws.queues[k] != nil:
			return k, 0
		case yields && time.Until(until) > 0:
			return k, time.Until(until)
		default:
			delete(ws.yields, k)
		}
	}
	return "", 0
}
