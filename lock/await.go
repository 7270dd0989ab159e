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
func (req *request) await(ctx context.Context) (*Lease, error) {
	if !req.startTask() {
		return nil, ErrClosed
	}
	defer req.tasks.Done() // after abandonCall
	req.waits = true
	defer req.abandonCall()
	var outage outageState
	lease, err := req.retry(ctx, &outage)
	return lease, deadlineError(ctx, outage.annotate(err))
}

func (req *request) retry(ctx context.Context, outage *outageState) (lease *Lease, err error) {
	w := &waiter{owner: req.owner}
	defer func() {
		if w.queue != nil {
			req.waiters.leave(w, lease.duration())
		}
	}()
	if err := req.letOthersFirst(ctx, w); err != nil {
		return nil, err
	}
	for {
		got, err := req.attempt(ctx)
		within, again := outage.note(ctx, err, isUnavailable(err))
		if err != nil && !again || got.lease != nil {
			return got.lease, err
		}
		candidates := got.busy
		if err != nil {
			req.observer.unreachable(len(req.keys), err)
			candidates = req.notHeld()
		} else {
			within = got.wait
		}
		if len(candidates) == 0 { // it reenters: its owner holds all the keys, so it waits in no queue
			if err := pause(ctx, within, req.running.Done()); err != nil {
				return nil, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
			}
			continue
		}
		key := candidates[0]
		if w.queue != nil && slices.Contains(candidates, w.queue.key) {
			key = w.queue.key // it keeps its place
		}
		if first := req.waiters.join(w, key, within, got.listeners); !first {
			// Other waiters of this process come first now. An attempt that is still in progress must
			// not take the lock for this one.
			req.abandonCall()
		}
		if err := req.waiters.wait(ctx, w); err != nil {
			return nil, err
		}
	}
}

// letOthersFirst waits while a key is left to other processes or to earlier waiters of this one.
func (req *request) letOthersFirst(ctx context.Context, w *waiter) error {
	key, within := req.waiters.contended(req.owner, req.keys)
	if within > 0 {
		if err := pause(ctx, within, req.running.Done()); err != nil {
			return fmt.Errorf("wait for lock %s: %w", key, err)
		}
		key, _ = req.waiters.contended(req.owner, req.keys)
	}
	if key == "" || req.waiters.join(w, key, 0, 0) {
		return nil
	}
	return req.waiters.wait(ctx, w)
}

// notHeld returns the requested keys that their owner does not hold.
func (req *request) notHeld() []string {
	req.mu.Lock()
	defer req.mu.Unlock()
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
