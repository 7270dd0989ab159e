package lock

import (
	"context"
	"time"
)

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

// ending is somebody who wants to know when the lease ends, and why.
type endCallback struct{ call func(cause error) }

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
