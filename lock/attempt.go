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
func (l *Locker) attempt(ctx context.Context, req *request) (outcome, error) {
	got, err := l.acquireOnce(ctx, req)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // the client reports no more than that
			err = context.Cause(ctx)
		}
		return outcome{}, fmt.Errorf("acquire %s: %w", describe(req.keys), err)
	}
	l.observer.busy(len(got.busy))
	return got, nil
}

func describe(keys []string) string {
	if len(keys) == 1 {
		return "lock " + keys[0]
	}
	return fmt.Sprintf("%d locks", len(keys))
}

func (l *Locker) acquireOnce(ctx context.Context, req *request) (outcome, error) {
	if err := req.owner.enter(ctx); err != nil {
		return outcome{}, err
	}
	defer req.owner.leave()

	if !l.startTask() {
		return outcome{}, ErrClosed
	}
	defer l.tasks.Done()
	le := &Lease{locker: l, owner: req.owner, length: req.lease, watched: req.watched, sem: make(chan struct{}, 1)}
	fresh, err := l.reenter(ctx, le, req)
	if err != nil {
		return outcome{}, l.undo(ctx, le, err)
	}
	reentered := len(le.holds)
	var got outcome
	for chunk := range slices.Chunk(fresh, keysPerCall) {
		t, err := l.takeChunk(ctx, le, req, chunk)
		if err != nil {
			return outcome{}, l.undo(ctx, le, err)
		}
		for i, key := range chunk {
			if t.answers[i] == answerBusy {
				got.busy = append(got.busy, key)
			}
		}
		got.wait, got.listeners = max(got.wait, t.wait), max(got.listeners, t.listeners)
	}
	if req.mode == modeAll && len(got.busy) > 0 {
		return got, l.undo(ctx, le, nil)
	}
	if err := l.activate(le, req.keys); err != nil {
		return outcome{}, l.undo(ctx, le, err)
	}
	l.observer.reentered(reentered)
	l.observer.acquired(len(le.holds)-reentered, req.since)
	got.lease = le
	return got, nil
}

// startTask makes Close wait until tasks.Done, and returns false if the Locker is closed.
func (l *Locker) startTask() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.tasks.Add(1)
	}
	return !l.closed
}

// spawnTask runs f in a goroutine that Close waits for, unless the Locker is closed.
func (l *Locker) spawnTask(f func()) bool {
	if !l.startTask() {
		return false
	}
	go func() {
		defer l.tasks.Done()
		f()
	}()
	return true
}

// reenter adds to the lease what its owner already holds, extends it where needed, and returns the
// other keys.
func (l *Locker) reenter(ctx context.Context, le *Lease, req *request) (fresh []string, err error) {
	var short []*hold
	l.mu.Lock()
	if len(req.owner.holds) == 0 {
		l.mu.Unlock()
		return req.keys, nil
	}
	now := time.Now()
	var lost []string
	for i, key := range req.keys {
		h := req.owner.holds[key]
		if h == nil {
			if fresh == nil {
				fresh = make([]string, 0, len(req.keys)-i)
			}
			fresh = append(fresh, key)
			continue
		}
		if !h.valid(now) {
			lost = append(lost, key)
			continue
		}
		le.add(h)
		if !req.longEnough(h, now) {
			short = append(short, h)
		}
	}
	l.mu.Unlock()
	if len(lost) > 0 {
		return nil, &LostError{Keys: lost}
	}
	for chunk := range slices.Chunk(short, renewalsPerCall) {
		if err := l.renew(ctx, chunk, req.lease); err != nil {
			return nil, err
		}
	}
	return fresh, nil
}

// longEnough reports whether a held lock lasts for one more lease. For a watched lease it does: the
// watchdog renews the lock, immediately if little time is left.
func (req *request) longEnough(h *hold, now time.Time) bool {
	return req.watched || !h.ends.Before(now.Add(req.lease-drift(req.lease)))
}

// takeChunk makes one script call and adds to the lease what that took, or may have taken.
func (l *Locker) takeChunk(ctx context.Context, le *Lease, req *request, keys []string) (acquireReply, error) {
	g := l.callFor(req, keys)
	sent := time.Now()
	t, err := l.sendAcquire(ctx, g, req.mode, req.waits, keys, req.lease)
	// A waiter repeats this call until Redis answers, and the repeat takes nothing twice. If it
	// gives up before that, abandonRequest releases what the call took.
	repeats := req.waits && ctx.Err() == nil && isUnavailable(err)
	nothing := req.mode == modeAll && slices.Contains(t.answers, answerBusy) || rejected(err) || repeats

	l.mu.Lock()
	defer l.mu.Unlock()
	g.token = t.token
	took := false
	for i, key := range keys {
		if nothing || err == nil && t.answers[i] != answerHeld {
			continue
		}
		took = true
		// What may have been taken counts as lost: it is released and not reported.
		h := &hold{grant: g, key: key, lost: err != nil, alarm: alarm{index: notInHeap}}
		h.extend(sent, req.lease)
		if err == nil && req.owner.holds != nil {
			req.owner.holds[key] = h
			l.waiting.wakeOwner(key, req.owner)
		}
		le.add(h)
	}
	switch {
	case took:
		req.call = nil
	case !req.waits:
		l.freeReceipt(g.acquireCall)
	}
	return t, err
}

// callFor returns a new call for each attempt. A waiter has one call for all its attempts as long
// as they name the same keys.
func (l *Locker) callFor(req *request, keys []string) *grant {
	if req.call != nil {
		if slices.Equal(req.callKeys, keys) {
			return req.call
		}
		l.abandonRequest(req)
	}
	l.mu.Lock()
	c := l.newCall()
	l.mu.Unlock()
	g := &grant{owner: l.ownerName(c.serial), acquireCall: c}
	if req.waits {
		req.call, req.callKeys = g, keys
	}
	return g
}

// abandonRequest makes sure that an attempt which is still in progress takes nothing.
func (l *Locker) abandonRequest(req *request) {
	if req.call == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abandonCall(req.lease, abandonedCall{call: l.releaseCall(req.call), owner: req.call.owner, keys: req.callKeys})
	req.call = nil
}

// activate gives the lease to its holder, unless it is already lost.
func (l *Locker) activate(le *Lease, keys []string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	if err := le.err(time.Now()); err != nil {
		return err
	}
	le.orderBy(keys)
	le.active = true
	if len(le.holds) > 0 {
		l.leases[le] = struct{}{}
	}
	return nil
}

// undo releases a lease that no caller has, and returns err.
func (l *Locker) undo(ctx context.Context, le *Lease, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	_ = le.release(ctx, ErrReleased)
	le.abandon()
	return err
}
