package lock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// undoTimeout is short: the caller already has an error, and a Redis that did not answer will
// hardly answer now.
const undoTimeout = time.Second

// outcome is the result of an attempt: a lease, and the keys that are busy. In mode all it has one
// of them only.
type outcome struct {
	lease *Lease
	busy  []string
	// wait is when the busy keys are free unless they are renewed, 0 if unknown. listeners is how
	// many connections listen for the release of the first.
	wait      time.Duration
	listeners int
}

// attempt asks once.
func (req *request) attempt(ctx context.Context) (outcome, error) {
	got, err := req.take(ctx)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // the client reports no more than that
			err = context.Cause(ctx)
		}
		return outcome{}, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
	}
	req.observer.busy(len(got.busy))
	return got, nil
}

func describe(keys []string) string {
	if len(keys) == 1 {
		return "lock " + keys[0]
	}
	return fmt.Sprintf("%d locks", len(keys))
}

func (req *request) take(ctx context.Context) (got outcome, err error) {
	if err := req.owner.enter(ctx); err != nil {
		return outcome{}, err
	}
	defer req.owner.leave()
	if !req.startTask() {
		return outcome{}, ErrClosed
	}
	defer req.tasks.Done()

	le := newLease(req)
	defer func() {
		if got.lease == nil {
			le.undo(ctx)
		}
	}()
	fresh, err := req.reenter(ctx, le)
	if err != nil {
		return outcome{}, err
	}
	reentered := len(le.holds)
	for chunk := range slices.Chunk(fresh, keysPerCall) {
		reply, err := req.takeChunk(ctx, le, chunk)
		if err != nil {
			return outcome{}, err
		}
		got.busy = append(got.busy, reply.busy(chunk)...)
		got.wait, got.listeners = max(got.wait, reply.wait), max(got.listeners, reply.listeners)
	}
	if req.mode == modeAll && len(got.busy) > 0 {
		return got, nil
	}
	if err := le.activate(req.keys); err != nil {
		return outcome{}, err
	}
	req.observer.reentered(reentered)
	req.observer.acquired(len(le.holds)-reentered, req.since)
	got.lease = le
	return got, nil
}

// reenter adds to the lease what its owner already holds, extends it where needed, and returns the
// other keys.
func (req *request) reenter(ctx context.Context, le *Lease) (fresh []string, err error) {
	req.mu.Lock()
	if len(req.owner.holds) == 0 {
		req.mu.Unlock()
		return req.keys, nil
	}
	now := time.Now()
	var short []*hold
	var lost []string
	for _, key := range req.keys {
		h := req.owner.holds[key]
		switch {
		case h == nil:
			fresh = append(fresh, key)
		case !h.valid(now):
			lost = append(lost, key)
		default:
			le.add(h)
			// The watchdog renews a watched lease, immediately if little time is left.
			if !req.watched && h.ends.Before(now.Add(req.lease-drift(req.lease))) {
				short = append(short, h)
			}
		}
	}
	req.mu.Unlock()
	if len(lost) > 0 {
		return nil, &LostError{Keys: lost}
	}
	for chunk := range slices.Chunk(short, renewalsPerCall) {
		if err := req.renew(ctx, chunk, req.lease); err != nil {
			return nil, err
		}
	}
	return fresh, nil
}

// takeChunk makes one script call and adds to the lease what that took, or may have taken.
func (req *request) takeChunk(ctx context.Context, le *Lease, keys []string) (acquireReply, error) {
	g := req.callFor(keys)
	sent := time.Now()
	reply, err := req.scripts.sendAcquire(ctx, g, req.mode, req.waits, keys, req.lease)
	// A waiter repeats this call until Redis answers, and the repeat takes nothing twice. If it
	// gives up before that, abandonCall releases what the call took.
	repeats := req.waits && ctx.Err() == nil && isUnavailable(err)
	nothing := req.mode == modeAll && slices.Contains(reply.answers, answerBusy) || rejected(err) || repeats

	req.mu.Lock()
	defer req.mu.Unlock()
	g.token = reply.token
	took := false
	for i, key := range keys {
		if nothing || err == nil && reply.answers[i] != answerHeld {
			continue
		}
		took = true
		// What may have been taken counts as lost: it is released and not reported.
		h := &hold{grant: g, key: key, lost: err != nil}
		h.extend(sent, req.lease)
		if err == nil && req.owner.holds != nil {
			req.owner.holds[key] = h
			req.waiters.wakeOwner(key, req.owner)
		}
		le.add(h)
	}
	switch {
	case took:
		req.call = nil
	case !req.waits:
		req.calls.done(g.acquireCall)
	}
	return reply, err
}

// callFor returns a new call for each attempt. A waiter has one call for all its attempts as long
// as they name the same keys.
func (req *request) callFor(keys []string) *grant {
	if req.call != nil {
		if slices.Equal(req.callKeys, keys) {
			return req.call
		}
		req.abandonCall()
	}
	req.mu.Lock()
	defer req.mu.Unlock()
	g := req.calls.acquire()
	if req.waits {
		req.call, req.callKeys = g, keys
	}
	return g
}

// abandonCall makes sure that an attempt which is still in progress takes nothing.
func (req *request) abandonCall() {
	if req.call == nil {
		return
	}
	req.mu.Lock()
	defer req.mu.Unlock()
	req.calls.abandon(req.lease, abandonedCall{
		call: req.calls.release(req.call), owner: req.call.owner, keys: req.callKeys,
	})
	req.call = nil
}
