package lock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	// outagePause is how long a waiter pauses after it could not reach Redis, and twice as long after each further
	// time, up to outagePauseMax.
	outagePause    = 20 * time.Millisecond
	outagePauseMax = time.Second
)

const (
	// immediateAskers is how many of those who hear of a release ask at once, more or less: nobody does once in
	// twenty times.
	immediateAskers = 3
	// askSpread is the time for each of the others, so that few of them ask while the lock is held again.
	askSpread = time.Millisecond
	// yieldProcessesMax is for how many other processes at most there is a yield.
	yieldProcessesMax = 5
	// yieldsMax bounds the keys that are noted as left to others.
	yieldsMax = 1024
)

// endedMax bounds the channels that are noted as ended.
const endedMax = 1024

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

// rouse wakes whoever sleeps on a channel that holds one value.
func signal(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default: // it is being woken
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

// wakeFirst needs mu.
func (ws *waiting) wakeFirst(key string) {
	if q := ws.queues[key]; q != nil {
		q.waiters[0].askNow()
	}
}

// released has the first who waits for a lock here ask for it or leave that to others for a while.
//
// If the lock was released here and other processes listen, they come first: the message is here sooner than there,
// where it wakes a thread of Java, so this process would hand the lock to itself again and again. And where many
// processes listen, not all ask: Redis would answer the one who gets it last, because it answers those
// who ask at the same time together. It needs mu.
func (ws *waiting) onRelease(key string) {
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

func (ws *waiting) yieldTime(processes int) time.Duration {
	return time.Duration(min(processes, yieldProcessesMax)) * ws.yield
}

// noteYield is told how many connections heard of the release of a lock by the call of a serial. If others than
// this process's are among them, and nobody waits here who would hear of it as well, the next who wants the lock here
// comes after them.
func (l *Locker) noteYield(key string, listeners int, serial uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ws := &l.waiting
	channel := channelOf(key)
	if ws.channels[channel] > 0 || ws.ended[channel] >= serial {
		listeners--
	}
	if listeners <= 0 || ws.queues[key] != nil {
		return
	}
	if len(ws.yields) >= yieldsMax {
		clear(ws.yields) // it was for milliseconds
	}
	ws.yields[key] = time.Now().Add(ws.yieldTime(listeners))
}

// unsubscribed notes that a subscription to a channel ended, by the word of Redis. It needs mu.
func (l *Locker) unsubscribed(channel string, wanted bool) {
	left := l.waiting.channels[channel] - 1
	switch {
	case left > 0:
		l.waiting.channels[channel] = left
	case !wanted: // or the client subscribes again by itself
		l.endChannel(channel)
	}
}

// endChannel notes that no listener hears a channel any more. It needs mu.
func (l *Locker) endChannel(channel string) {
	ws := &l.waiting
	delete(ws.channels, channel)
	if len(ws.ended) >= endedMax {
		clear(ws.ended) // it was for the time of one call
	}
	ws.ended[channel] = l.serial
}

// yieldLeft is how long others come first. It needs mu.
func (ws *waiting) yieldLeft(key string) time.Duration {
	until, noted := ws.yields[key]
	if !noted {
		return 0
	}
	within := time.Until(until)
	if within <= 0 {
		delete(ws.yields, key)
	}
	return within
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

// await asks until it gets all. On its way out of an outage of Redis it asks by the call by which it asked before.
func (l *Locker) await(ctx context.Context, req *request) (*Lease, error) {
	if !l.startTask() {
		return nil, ErrClosed
	}
	defer l.tasks.Done() // when it has given up
	var outage outage
	lease, err := l.acquireLoop(ctx, req, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

func (l *Locker) acquireLoop(ctx context.Context, req *request, outage *outage) (*Lease, error) {
	req.waits = true
	defer l.abandonRequest(req)
	var w *waiter
	key, within := l.contendedKey(req)
	if within > 0 {
		if err := l.sleep(ctx, within); err != nil {
			return nil, fmt.Errorf("wait for lock %s: %w", key, err)
		}
		key, _ = l.contendedKey(req)
	}
	if key != "" {
		w = newWaiter(req.owner)
		if first := l.joinQueue(w, key, 0, 0); !first {
			if err := l.wait(ctx, w, key); err != nil {
				return nil, err
			}
		}
	}
	for {
		got, err := l.attempt(ctx, req)
		within, retry := outage.note(ctx, err, unavailable(err))
		if err != nil && !retry || err == nil && len(got.busy) == 0 {
			l.leaveQueue(w, got.lease)
			return got.lease, err
		}
		if w == nil {
			w = newWaiter(req.owner)
		}
		candidates := got.busy
		if err != nil {
			l.observer.unreachable(len(req.keys), err)
			candidates = l.notHeld(req)
		} else {
			within = got.wait
		}
		if len(candidates) == 0 { // it goes deeper, and stands in no queue for what its owner holds
			if err := l.sleep(ctx, within); err != nil {
				return nil, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
			}
			continue
		}
		key := candidates[0]
		if w.queue != nil && slices.Contains(candidates, w.queue.key) {
			key = w.queue.key // it need not stand behind others anew
		}
		if first := l.joinQueue(w, key, within, got.listeners); !first {
			// It will not ask for long. An attempt that is still on its way must not take the lock for one
			// who stands behind others here.
			l.abandonRequest(req)
		}
		if err := l.wait(ctx, w, key); err != nil {
			return nil, err
		}
	}
}

// outage is what a waiter knows of a Redis that is away.
type outage struct {
	pause time.Duration // until its next try; 0 if Redis answered last
	why   error
}

// note takes the error of an attempt, and tells whether the waiter goes on in spite of it, and after which time.
func (o *outage) note(ctx context.Context, err error, unavailable bool) (within time.Duration, retry bool) {
	switch {
	case ctx.Err() != nil && err != nil:
		return 0, false
	case !unavailable:
		*o = outage{}
		return 0, false
	}
	o.pause, o.why = min(max(outagePause, 2*o.pause), outagePauseMax), err
	return o.pause/2 + rand.N(o.pause/2), true // those of several processes apart
}

// explain adds to the error of one who gives up why Redis could not be asked.
func (o *outage) annotate(err error) error {
	if err == nil || o.why == nil {
		return err
	}
	return fmt.Errorf("%w; Redis could not be asked: %w", err, o.why)
}

// deadlineError has the error of one whose deadline has passed say that, and that the lock is busy.
func deadlineError(ctx context.Context, err error) error {
	ended := ctx.Err()
	switch {
	case err == nil || !errors.Is(ended, context.DeadlineExceeded):
		return err
	case errors.Is(err, ended):
		return fmt.Errorf("%w: %w", ErrBusy, err)
	case errors.Is(err, context.Cause(ctx)) || unavailable(err):
		return fmt.Errorf("%w: %w (%w)", ErrBusy, err, ended)
	}
	return err
}

// notHeld returns the keys that are asked for and that their owner does not hold.
func (l *Locker) notHeld(req *request) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(req.keys), func(key string) bool { return req.owner.holds[key] != nil })
}

// sleep returns early if the Locker is closed, which the next attempt finds.
func (l *Locker) sleep(ctx context.Context, d time.Duration) error {
	closing, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(l.running, stop)()
	if err := sleep(closing, d); err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func newWaiter(o *owner) *waiter { return &waiter{owner: o, wake: make(chan struct{}, 1)} }

// contendedKey returns the key that is asked for and that somebody waits for already, who comes first: here or, for
// the time that it returns, in another process. An owner that holds a key already does not stand behind those who
// wait for it to be released.
func (l *Locker) contendedKey(req *request) (key string, elsewhere time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.waiting.queues)+len(l.waiting.yields) == 0 {
		return "", 0
	}
	for _, k := range req.keys {
		if req.owner.holds[k] != nil {
			continue
		}
		if l.waiting.queues[k] != nil {
			return k, 0
		}
		if elsewhere := l.waiting.yieldLeft(k); elsewhere > 0 {
			return k, elsewhere
		}
	}
	return "", 0
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
