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

// notHeld returns the keys that are asked for and that their owner does not hold.
func (l *Locker) notHeld(req *request) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(req.keys), func(key string) bool { return req.owner.holds[key] != nil })
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

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
