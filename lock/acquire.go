package lock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// undoTimeout is short because a caller waits who has an error already, and a Redis that did not
// answer will hardly do so now.
const undoTimeout = time.Second

// Acquire takes the lock of a key, and waits for it until ctx is done. Without For, the lease is renewed
// until it is released. An owner in ctx (see [Lease.Context]) that holds the lock goes deeper into it,
// without asking Redis unless the lock has to last longer for it.
//
// Those who wait in one process are served in order, and only the first of them asks Redis: when the
// lock is released, when its lease has run out, and after the time of WithPoll. Between processes, the
// first to ask after a release is served.
//
// A Redis that cannot be reached, or says that it cannot serve now (LOADING, READONLY, MASTERDOWN and the like),
// is waited for as a lock that is busy; Observer.Unreachable tells of it. So without a deadline in ctx, Acquire
// waits as long as Redis is away.
//
// If the deadline of ctx passes first, the error wraps both ErrBusy and context.DeadlineExceeded and, if Redis
// could not be asked at last, why. On an error, whatever the call has or may have taken is given back; if Redis
// cannot be reached for that either, as soon as it can. Other errors are ErrInvalid, ErrLost, ErrClosed, the
// cause of a ctx that was cancelled, and what Redis answers to a call that no repeat mends, as to a wrong password.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	req, err := l.newRequest(ctx, modeAll, []string{key}, opts)
	if err != nil {
		return nil, err
	}
	return l.await(ctx, req)
}

// TryAcquire is Acquire that does not wait: ErrBusy tells that another owner holds the lock. It does not wait
// for Redis either, and returns the error.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	req, err := l.newRequest(ctx, modeAll, []string{key}, opts)
	if err != nil {
		return nil, err
	}
	got, err := l.attempt(ctx, req)
	switch {
	case err != nil:
		return nil, err
	case len(got.busy) > 0:
		return nil, fmt.Errorf("%w: %s", ErrBusy, key)
	}
	return got.lease, nil
}

// AcquireAll takes the locks of all keys in one step, and waits until none of them is held by another
// owner or ctx is done. It holds none while it waits, so those who take the same keys in another order
// do not block each other; and one that wants many keys can be overtaken for as long as others want
// some of them. A key that is named twice is taken once. Otherwise it is as Acquire.
func (l *Locker) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*Lease, error) {
	if len(keys) > MaxKeysAtOnce {
		return nil, fmt.Errorf("%w: %d keys at once, want at most %d", ErrInvalid, len(keys), MaxKeysAtOnce)
	}
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, err
	}
	return l.await(ctx, req)
}

// TryEach takes the lock of every key that is free, or held by the owner in ctx (see [Lease.Context]),
// and never waits: it returns a lease on those that it got, which may be none, and the keys that others
// hold, in the order given. A key that is named twice is taken once.
//
// It costs one round trip for every 512 keys. All keys of the call have the same owner; without one
// in ctx that is a new one.
//
// Going deeper into a lock that the owner has lost is refused, because whoever does it counts on
// having been alone all the while. Errors are as those of TryAcquire, without ErrBusy.
func (l *Locker) TryEach(ctx context.Context, keys []string, opts ...AcquireOption) (lease *Lease, busy []string, err error) {
	req, err := l.newRequest(ctx, modeEach, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := l.attempt(ctx, req)
	return got.lease, got.busy, err
}

// Do calls f with the lock of a key held, and the lease's context: it ends when the lock is lost. The
// error joins that of f and, if the lock was lost or could not be released, of Release.
func (l *Locker) Do(ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption) (err error) {
	lease, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	defer func() { // also if f panics
		if released := lease.Release(ctx); released != nil {
			lease.abandon()
			err = errors.Join(err, released)
		}
	}()
	return f(lease.Context(ctx))
}

// asking is what one acquire asks for, however often it has to.
type request struct {
	terms
	owner *owner
	mode  string
	keys  []string
	since time.Time
	// waits is set for one that asks again and again, by the same call: asked is what that was for.
	waits    bool
	call     *grant
	callKeys []string
}

func (l *Locker) newRequest(ctx context.Context, mode string, keys []string, opts []AcquireOption) (*request, error) {
	t, err := l.terms(opts)
	if err != nil {
		return nil, err
	}
	if l.clientErr != nil {
		return nil, l.clientErr
	}
	if keys, err = l.validate(keys); err != nil {
		return nil, err
	}
	return &request{terms: t, owner: l.owner(ctx), mode: mode, keys: keys, since: time.Now()}, nil
}

// validate returns the keys without those that were named before.
func (l *Locker) validate(keys []string) ([]string, error) {
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%w: %d keys, want at most %d", ErrInvalid, len(keys), MaxKeys)
	}
	for _, key := range keys {
		if err := l.validateKey(key); err != nil {
			return nil, err
		}
		if l.clustered && hashTag(key) != hashTag(keys[0]) {
			return nil, fmt.Errorf("%w: in a cluster, keys of one call have to share a hash tag: %q and %q do not", ErrInvalid, keys[0], key)
		}
	}
	if len(keys) == 1 {
		return []string{keys[0]}, nil // the caller may change its own while this one waits
	}
	once := make([]string, 0, len(keys))
	seen := make(map[string]struct{}, len(keys))
	for _, key := range keys {
		if _, again := seen[key]; !again {
			seen[key] = struct{}{}
			once = append(once, key)
		}
	}
	return once, nil
}

func (l *Locker) validateKey(key string) error {
	switch {
	case key == "" || len(key) > MaxKeyBytes:
		return fmt.Errorf("%w: a key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKeyBytes)
	case l.clustered && hashTag(key) == key && strings.ContainsAny(key, "{}"):
		return fmt.Errorf("%w: in a cluster, key %q has to have a hash tag, or no braces: its channel would lie in another slot", ErrInvalid, key)
	case l.clustered && hashTag(l.prefix) != l.prefix && hashTag(l.prefix) != hashTag(key):
		return fmt.Errorf("%w: in a cluster, key %q has to have the hash tag of the prefix %q", ErrInvalid, key, l.prefix)
	}
	return nil
}

// outcome is what an attempt came to: a lease, or in mode all none, and what is busy.
type outcome struct {
	lease *Lease
	busy  []string
	// wait is after how long that is free if nobody renews it, 0 if it is not known, and listeners how many
	// connections wait for the first of it.
	wait      time.Duration
	listeners int
}

// attempt asks once.
func (l *Locker) attempt(ctx context.Context, req *request) (outcome, error) {
	got, err := l.acquireOnce(ctx, req)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // the client knows no more than that
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

// begin counts what Close has to wait for until tasks.Done, unless the Locker is closed.
func (l *Locker) startTask() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.tasks.Add(1)
	}
	return !l.closed
}

// give makes a lease ready for its holder, unless it is lost already.
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

// undo ends a lease that nobody was given, and returns the error with which it was begun.
func (l *Locker) undo(ctx context.Context, le *Lease, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	_ = le.release(ctx, ErrReleased)
	le.abandon()
	return err
}

// reenter adds to the lease what its owner holds already, makes that last long enough, and returns the
// keys that it does not hold.
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

// lasts tells whether a lock that is held lasts long enough for one more lease. For one that is to be
// kept up it does: the watchdog renews the lock, at once if it is short.
func (req *request) longEnough(h *hold, now time.Time) bool {
	return req.watched || !h.ends.Before(now.Add(req.lease-drift(req.lease)))
}

// takeChunk sends one call, and adds to the lease what that took, or may have taken.
func (l *Locker) takeChunk(ctx context.Context, le *Lease, req *request, keys []string) (acquireReply, error) {
	g := l.callFor(req, keys)
	sent := time.Now()
	t, err := l.sendAcquire(ctx, g, req.mode, req.waits, keys, req.lease)
	// What waits while Redis is away repeats this very call, which goes no deeper for it. If it gives up before
	// that, what the call took is released.
	repeats := req.waits && ctx.Err() == nil && unavailable(err)
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
		// What may have been taken counts as lost: it is released, and nobody has to be told.
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

// callFor makes a call of its own for each attempt, but for one that waits: all its attempts are one call, as
// long as they ask for the same locks.
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

// giveUp makes sure that no attempt that is still on its way takes what nobody waits for any more.
func (l *Locker) abandonRequest(req *request) {
	if req.call == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abandonCall(req.lease, abandonedCall{call: l.releaseCall(req.call), owner: req.call.owner, keys: req.callKeys})
	req.call = nil
}

// renew asks for a longer lease for some locks at once; an error is a *LostError, or Redis's.
func (l *Locker) renew(ctx context.Context, holds []*hold, lease time.Duration) error {
	sent := time.Now()
	renewed, err := l.sendRenew(ctx, holds, lease)
	l.observer.renewed(len(holds), sent, err)
	if err != nil {
		return err
	}
	var callbacks []func()
	var lost []string
	untold := 0
	l.mu.Lock()
	for i, h := range holds {
		switch {
		case len(h.leases) == 0: // released meanwhile
		case renewed[i]:
			// A lease that ended before the answer came stays ended: its holder may have been told.
			if h.valid(time.Now()) {
				h.extend(sent, lease)
			}
			l.watchdog.update(h)
		default:
			lost = append(lost, h.key)
			if !h.lost { // or its lease ended before the answer came
				untold++
				callbacks = append(callbacks, l.markLost(h)...)
			}
		}
	}
	l.mu.Unlock()
	l.reportLost(untold, callbacks)
	if len(lost) > 0 {
		return &LostError{Keys: lost}
	}
	return nil
}
