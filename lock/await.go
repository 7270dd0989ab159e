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
	// outagePause is the pause after a first attempt that could not reach Redis. It doubles with
	// each further one, up to outagePauseMax.
	outagePause    = 20 * time.Millisecond
	outagePauseMax = time.Second
)

// await retries until the request has all its locks.
func (l *Locker) await(ctx context.Context, req *request) (*Lease, error) {
	if !l.startTask() {
		return nil, ErrClosed
	}
	defer l.tasks.Done() // after abandonRequest
	var outage outageState
	lease, err := l.acquireLoop(ctx, req, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

func (l *Locker) acquireLoop(ctx context.Context, req *request, outage *outageState) (*Lease, error) {
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
		within, retry := outage.note(ctx, err, isUnavailable(err))
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
		if len(candidates) == 0 { // it reenters: its owner holds all the keys, so it waits in no queue
			if err := l.sleep(ctx, within); err != nil {
				return nil, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
			}
			continue
		}
		key := candidates[0]
		if w.queue != nil && slices.Contains(candidates, w.queue.key) {
			key = w.queue.key // it keeps its place
		}
		if first := l.joinQueue(w, key, within, got.listeners); !first {
			// Other waiters of this process come first now. An attempt that is still in progress must
			// not take the lock for this one.
			l.abandonRequest(req)
		}
		if err := l.wait(ctx, w, key); err != nil {
			return nil, err
		}
	}
}

// contendedKey returns a requested key that is left to others first: to waiters in this process or,
// for the returned time, to another process. A key that the owner holds is not left to those who
// wait for its release.
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

// notHeld returns the requested keys that their owner does not hold.
func (l *Locker) notHeld(req *request) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(req.keys), func(key string) bool { return req.owner.holds[key] != nil })
}

// outageState is what a waiter knows about a Redis that is unavailable.
type outageState struct {
	pause time.Duration // until its next attempt; 0 if Redis answered the last one
	why   error
}

// note takes the error of an attempt. It reports whether the waiter retries, and after which time.
func (o *outageState) note(ctx context.Context, err error, unavailable bool) (within time.Duration, retry bool) {
	switch {
	case ctx.Err() != nil && err != nil:
		return 0, false
	case !unavailable:
		*o = outageState{}
		return 0, false
	}
	o.pause, o.why = min(max(outagePause, 2*o.pause), outagePauseMax), err
	return o.pause/2 + rand.N(o.pause/2), true // random, so that processes do not retry together
}

// annotate adds the last error of an unavailable Redis to the error of a waiter that gives up.
func (o *outageState) annotate(err error) error {
	if err == nil || o.why == nil {
		return err
	}
	return fmt.Errorf("%w; Redis is unavailable: %w", err, o.why)
}

// deadlineError adds ErrBusy to the error of a waiter whose deadline has passed.
func deadlineError(ctx context.Context, err error) error {
	ended := ctx.Err()
	switch {
	case err == nil || !errors.Is(ended, context.DeadlineExceeded):
		return err
	case errors.Is(err, ended):
		return fmt.Errorf("%w: %w", ErrBusy, err)
	case errors.Is(err, context.Cause(ctx)) || isUnavailable(err):
		return fmt.Errorf("%w: %w (%w)", ErrBusy, err, ended)
	}
	return err
}

// sleep returns early if the Locker is closed; the next attempt reports it.
func (l *Locker) sleep(ctx context.Context, d time.Duration) error {
	closing, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(l.running, stop)()
	if err := pauseFor(closing, d); err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

func pauseFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
