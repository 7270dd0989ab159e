package lock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// releaseTimeout bounds a release, which does not end with its caller's context.
const releaseTimeout = 5 * time.Second

// closeParallel is how many leases Close releases at the same time.
const closeParallel = 16

// Lease is a hold on some locks. Each has to be released, also when it has ended: only then does its
// owner know that it may take the locks anew, and only then does the watchdog leave off. It is safe for
// concurrent use.
type Lease struct {
	locker  *Locker
	owner   *owner
	length  time.Duration
	watched bool
	holds   []*hold // in the order in which they were asked for; fixed once the lease is given out
	byKey   map[string]*hold

	// What follows is guarded by Locker.mu.

	// given is set when somebody has the lease, and does not change after that.
	active bool
	// over is why the lease is not held any more, after its release: ErrReleased, ErrClosed, or what
	// was lost by then.
	endErr    error
	callbacks map[*endCallback]struct{}

	// turn is taken for the time of a release, and guards what follows.
	sem     chan struct{}
	pending []pendingRelease
	// lost is what was found lost and not yet told.
	lost []string
}

// parting is one script call that releases what nobody holds any more.
type pendingRelease struct {
	call  call
	grant *grant
	holds []*hold
}

// ending is somebody who wants to know when the lease ends, and why.
type endCallback struct{ call func(cause error) }

// add needs mu.
func (le *Lease) add(h *hold) {
	h.leases = append(h.leases, le)
	le.holds = append(le.holds, h)
	if le.watched {
		le.locker.watchdog.watch(h)
	}
}

// orderBy brings the holds into the order of the keys. It needs mu.
func (le *Lease) orderBy(keys []string) {
	if len(keys) == 1 {
		return
	}
	le.byKey = make(map[string]*hold, len(le.holds))
	for _, h := range le.holds {
		le.byKey[h.key] = h
	}
	le.holds = le.holds[:0]
	for _, key := range keys {
		if h := le.byKey[key]; h != nil {
			le.holds = append(le.holds, h)
		}
	}
}

func (le *Lease) find(key string) *hold {
	switch {
	case le.byKey != nil:
		return le.byKey[key]
	case len(le.holds) == 1 && le.holds[0].key == key:
		return le.holds[0]
	}
	return nil
}

// Keys returns the keys that the lease was given, in the order in which they were asked for.
func (le *Lease) Keys() []string { return keysOf(le.holds) }

func keysOf(holds []*hold) []string {
	keys := make([]string, len(holds))
	for i, h := range holds {
		keys[i] = h.key
	}
	return keys
}

// Token returns the fencing token of a key, and 0 if the lease was not given it. It is larger than that
// of any earlier acquire of the key, and the same for all who went deeper into it; it fits a BIGINT.
// What the lock protects should keep the largest token that it has seen, and refuse a smaller one.
func (le *Lease) Token(key string) int64 {
	if h := le.find(key); h != nil {
		return h.token
	}
	return 0
}

// Holds tells whether the lease was given this key, has not released it, and has not lost it as far
// as this process knows; see Err.
func (le *Lease) Holds(key string) bool {
	h := le.find(key)
	if h == nil {
		return false
	}
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return le.endErr == nil && h.valid(time.Now())
}

// Err returns nil as long as the lease holds all its locks, and then a *LostError that names those that
// are lost, or ErrReleased or ErrClosed. It asks no server but the clock and what the watchdog knows, so
// it costs next to nothing, and is right also in a process that was stopped while its lease ended.
func (le *Lease) Err() error {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return le.err(time.Now())
}

// err needs mu.
func (le *Lease) err(now time.Time) error {
	if le.endErr != nil {
		return le.endErr
	}
	var lost []string
	for _, h := range le.holds {
		if !h.valid(now) {
			lost = append(lost, h.key)
		}
	}
	if len(lost) > 0 {
		return &LostError{Keys: lost}
	}
	return nil
}

// Context returns a context that carries the owner of the lease, and ends with the lease: its cause is
// then what Err returns.
//
// With it, whoever acquires a lock that the owner holds from the same Locker goes deeper into it, and the
// lock is free when each of these leases is released, in whatever order. So goroutines that share
// such a context share the lock: they exclude others, and not each other.
func (le *Lease) Context(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(le.withOwner(ctx))
	le.onEnd(ctx, cancel)
	return ctx
}

// withOwner returns a context with which others go deeper into what the owner holds.
func (le *Lease) withOwner(ctx context.Context) context.Context {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	if le.endErr == nil {
		le.owner.share(le.holds)
	} else {
		le.owner.share(nil)
	}
	return context.WithValue(ctx, ownerKey{le.locker}, le.owner)
}

// onEnd has tell called when the lease ends, unless ctx ends before: at once if it has ended.
func (le *Lease) onEnd(ctx context.Context, f func(cause error)) {
	l := le.locker
	e := &endCallback{}
	forget := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(le.callbacks, e)
	})
	e.call = func(cause error) {
		forget()
		f(cause)
	}
	l.mu.Lock()
	err := le.err(time.Now())
	if err == nil && ctx.Err() == nil {
		if le.callbacks == nil {
			le.callbacks = make(map[*endCallback]struct{}, 1)
		}
		le.callbacks[e] = struct{}{}
		for _, h := range le.holds {
			l.watchdog.watch(h)
		}
	}
	l.mu.Unlock()
	if err != nil {
		e.call(err)
	}
}

// end takes away those who want to know of the end, as functions to be called without mu. It needs mu.
func (le *Lease) takeCallbacks(cause error) []func() {
	callbacks := make([]func(), 0, len(le.callbacks))
	for e := range le.callbacks {
		callbacks = append(callbacks, func() { e.call(cause) })
	}
	le.callbacks = nil
	return callbacks
}

// lose notes that a lock is lost, and returns whom to tell. It needs mu.
func (l *Locker) markLost(h *hold) []func() {
	h.lost = true
	l.watchdog.unwatch(h)
	var callbacks []func()
	now := time.Now()
	for _, le := range h.leases {
		callbacks = append(callbacks, le.takeCallbacks(le.err(now))...)
	}
	return callbacks
}

func (l *Locker) reportLost(locks int, callbacks []func()) {
	l.observer.lost(locks)
	for _, tell := range callbacks {
		tell()
	}
}

// Release gives up the hold on all keys, in one round trip for every 512 of them that nobody of the same
// owner holds any more. It goes on when ctx is done, for at most five seconds, because a lock that is left
// behind keeps others waiting until its lease ends.
//
// A *LostError names the keys that were not held any more; the others are released. After any other
// error Release may be called again, and goes on with what is left. To release twice is no error.
func (le *Lease) Release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return le.release(ctx, ErrReleased)
}

func (le *Lease) release(ctx context.Context, cause error) error {
	select {
	case le.sem <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("release %s: %w", describe(le.Keys()), context.Cause(ctx))
	}
	defer func() { <-le.sem }()

	le.end(cause)
	var failed []error
	left := le.pending[:0]
	for _, p := range le.pending {
		keys := keysOf(p.holds)
		released, err := le.locker.sendRelease(ctx, p.call, p.grant.owner, keys)
		if err != nil {
			left = append(left, p)
			failed = append(failed, fmt.Errorf("release %s: %w", describe(keys), err))
			continue
		}
		le.locker.mu.Lock()
		le.locker.freeReceipt(p.call)
		le.locker.mu.Unlock()
		there, lost := 0, 0
		for i, h := range p.holds {
			switch {
			case released[i]:
				there++
			case !h.lost: // or it is told already
				lost++
				le.lost = append(le.lost, h.key)
			}
		}
		if le.active {
			le.locker.observer.released(there)
			le.locker.observer.lost(lost)
		}
	}
	le.pending = left
	if len(left) == 0 {
		le.locker.mu.Lock()
		delete(le.locker.leases, le)
		le.locker.mu.Unlock()
	}
	if len(le.lost) > 0 {
		failed = append(failed, &LostError{Keys: le.lost})
		le.lost = nil
	}
	return errors.Join(failed...)
}

// abandon hands what could not be released to those who try as soon as Redis can be reached. Nobody may
// release the lease after that.
func (le *Lease) abandon() {
	le.sem <- struct{}{}
	defer func() { <-le.sem }()
	l := le.locker
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range le.pending {
		l.abandonCall(le.length, abandonedCall{call: p.call, owner: p.grant.owner, keys: keysOf(p.holds)})
	}
	le.pending = nil
	delete(l.leases, le)
}

// part ends the lease in this process, if it has not ended so before: the locks that no other lease
// holds are to be released. Those that its holder was told to have lost, or would have been, count as lost
// even if Redis has kept them a little longer.
func (le *Lease) end(cause error) {
	l := le.locker
	l.mu.Lock()
	if le.endErr != nil {
		l.mu.Unlock()
		return
	}
	now := time.Now()
	if le.endErr = le.err(now); le.endErr == nil {
		le.endErr = cause
	}
	callbacks := le.takeCallbacks(le.endErr)
	lost := 0
	for _, h := range le.holds {
		h.leases = slices.DeleteFunc(h.leases, func(other *Lease) bool { return other == le })
		if !h.valid(now) {
			le.lost = append(le.lost, h.key)
			if !h.lost {
				lost++
				callbacks = append(callbacks, l.markLost(h)...)
			}
		}
		if len(h.leases) > 0 {
			continue
		}
		l.watchdog.unwatch(h)
		if q := l.waiting.queues[h.key]; q != nil {
			q.releasedHere = true
		}
		if le.owner.holds[h.key] == h {
			delete(le.owner.holds, h.key)
		}
		i := slices.IndexFunc(le.pending, func(p pendingRelease) bool { return p.grant == h.grant })
		if i < 0 {
			i = len(le.pending)
			le.pending = append(le.pending, pendingRelease{call: l.releaseCall(h.grant), grant: h.grant})
		}
		le.pending[i].holds = append(le.pending[i].holds, h)
	}
	l.mu.Unlock()
	l.reportLost(lost, callbacks)
}

// releaseCall needs mu.
func (l *Locker) releaseCall(g *grant) call {
	if g.receiptMoved {
		return l.newCall()
	}
	g.receiptMoved = true
	return call{receipt: g.acquireCall.receipt, serial: l.nextSerial()}
}

// releaseAll releases leases, some at the same time, and joins the errors. All of them end at once, because
// their holders must not wait for a Redis that is slow to hear that nobody renews them any more.
func releaseAll(ctx context.Context, leases []*Lease, cause error) error {
	for _, le := range leases {
		select {
		case le.sem <- struct{}{}:
			le.end(cause)
			<-le.sem
		default: // it is being released
		}
	}
	var mu sync.Mutex
	var failed []error
	next := make(chan *Lease)
	var workers sync.WaitGroup
	for range min(closeParallel, len(leases)) {
		workers.Go(func() {
			for le := range next {
				if err := le.release(ctx, cause); err != nil {
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, le := range leases {
		next <- le
	}
	close(next)
	workers.Wait()
	return errors.Join(failed...)
}
