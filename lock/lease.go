package lock

import (
	"context"
	"time"
)

// Lease holds one or more locks. Release each lease, also one that has ended: only then does the
// watchdog stop, and only then can its owner take lost locks again. It is safe for concurrent use.
type Lease struct {
	locker  *Locker
	owner   *lockOwner
	length  time.Duration
	watched bool
	holds   []*hold // in the order of the request; fixed once the lease is active
	byKey   map[string]*hold

	// Guarded by Locker.mu:

	// active is set when a caller has the lease.
	active bool
	// endErr is why a released lease has ended: ErrReleased, ErrClosed, or what was lost by then.
	endErr    error
	callbacks map[*func(cause error)]struct{} // called when the lease ends

	// sem is held during a release and guards the fields below.
	sem     chan struct{}
	pending []pendingRelease
	// lost are keys found lost and not yet reported.
	lost []string
}

func newLease(req *request) *Lease {
	return &Lease{
		locker: req.Locker, owner: req.owner, length: req.lease, watched: req.watched, sem: make(chan struct{}, 1),
		byKey: make(map[string]*hold, len(req.keys)), callbacks: make(map[*func(cause error)]struct{}),
	}
}

// add requires mu.
func (le *Lease) add(h *hold) {
	h.leases = append(h.leases, le)
	le.holds = append(le.holds, h)
	if le.watched {
		le.locker.watchdog.watch(h)
	}
}

// activate gives the lease to its holder, unless it is already lost.
func (le *Lease) activate(keys []string) error {
	l := le.locker
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	if err := le.err(time.Now()); err != nil {
		return err
	}
	for _, h := range le.holds {
		le.byKey[h.key] = h
	}
	le.holds = le.holds[:0]
	for _, key := range keys {
		if h := le.byKey[key]; h != nil {
			le.holds = append(le.holds, h)
		}
	}
	le.active = true
	if len(le.holds) > 0 {
		l.leases[le] = struct{}{}
	}
	return nil
}

// duration is how long the lease was requested for, 0 for no lease.
func (le *Lease) duration() time.Duration {
	if le == nil {
		return 0
	}
	return le.length
}

// Keys returns the keys that the lease got, in the order in which they were requested.
func (le *Lease) Keys() []string { return holdKeys(le.holds) }

// Token returns the fencing token of a key, or 0 if the lease did not get it. It is larger than the
// token of any earlier acquire of the key, and the same for reentries. It fits a BIGINT. A store
// that the lock protects should keep the largest token it has seen and refuse smaller ones.
func (le *Lease) Token(key string) int64 {
	if h := le.byKey[key]; h != nil {
		return h.token
	}
	return 0
}

// Holds reports whether the lease got this key, has not released it, and has not lost it as far as
// this process knows; see Err.
func (le *Lease) Holds(key string) bool {
	h := le.byKey[key]
	if h == nil {
		return false
	}
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return le.endErr == nil && h.valid(time.Now())
}

// Err returns nil while the lease holds all its locks. Later it returns a *LostError with the lost
// keys, ErrReleased or ErrClosed. It reads the clock and what the watchdog knows, without a call to
// Redis, so it is cheap and correct in a process that was stopped while its lease ended.
func (le *Lease) Err() error {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return le.err(time.Now())
}

// err requires mu.
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

// Context returns a context that carries the owner of the lease and ends with the lease. Its cause
// is then what Err returns.
//
// An acquire from the same Locker with this context reenters the locks that the owner holds. A lock
// is free when all leases on it are released, in any order. Goroutines that share the context share
// the lock: they exclude others but not each other.
func (le *Lease) Context(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(le.withOwner(ctx))
	le.onEnd(ctx, cancel)
	return ctx
}

// withOwner returns a context for acquires that reenter.
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

// onEnd calls f when the lease ends, immediately if it has ended, and not after ctx has ended.
func (le *Lease) onEnd(ctx context.Context, f func(cause error)) {
	l := le.locker
	l.mu.Lock()
	err := le.err(time.Now())
	if err == nil && ctx.Err() == nil {
		callback := &f
		le.callbacks[callback] = struct{}{}
		for _, h := range le.holds {
			l.watchdog.watch(h)
		}
		context.AfterFunc(ctx, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(le.callbacks, callback)
		})
	}
	l.mu.Unlock()
	if err != nil {
		f(err)
	}
}

// takeCallbacks removes the callbacks and returns them as functions to call without mu. Callers
// hold mu.
func (le *Lease) takeCallbacks(cause error) []func() {
	callbacks := make([]func(), 0, len(le.callbacks))
	for f := range le.callbacks {
		callbacks = append(callbacks, func() { (*f)(cause) })
	}
	clear(le.callbacks)
	return callbacks
}
