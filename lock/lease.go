package lock

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// lockOwner holds locks. It belongs to one acquire and to all acquires with the context of its leases.
type lockOwner struct {
	// sem is held during a script call, so that a reentering call waits for the outcome. It is nil
	// until the owner is shared, and a channel so that callers can stop waiting.
	sem chan struct{}
	// holds are the locks of a shared owner by key, also lost ones until their release. Guarded by
	// Locker.mu.
	holds map[string]*hold
}

// ownerKey finds the owner in a context. It holds the Locker because an owner in one Redis owns
// nothing in another.
type ownerKey struct{ *Locker }

func (l *Locker) owner(ctx context.Context) *lockOwner {
	if o, ok := ctx.Value(ownerKey{l}).(*lockOwner); ok {
		return o
	}
	return &lockOwner{}
}

func (o *lockOwner) enter(ctx context.Context) error {
	if ctx.Err() != nil { // select would choose at random
		return context.Cause(ctx)
	}
	if o.sem == nil {
		return nil
	}
	select {
	case o.sem <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (o *lockOwner) leave() {
	if o.sem != nil {
		<-o.sem
	}
}

// share lets other acquires find what the owner holds. Callers hold Locker.mu.
func (o *lockOwner) share(holds []*hold) {
	if o.sem != nil {
		return
	}
	o.sem = make(chan struct{}, 1)
	o.holds = make(map[string]*hold, len(holds))
	for _, h := range holds {
		o.holds[h.key] = h
	}
}

// grant is what one script call took. Each has its own owner name in Redis, because reentries are
// counted here and not there.
type grant struct {
	owner string
	token int64
	// acquireCall took the locks. Its receipt passes to the first call that releases some of them,
	// so that a late repeat of the acquire finds it.
	acquireCall  scriptCall
	receiptMoved bool // a release has taken the receipt
}

// hold is one lock of an owner, shared by all its leases. Guarded by Locker.mu.
type hold struct {
	*grant
	key string
	// ends is when the lease ends by this process's clocks. It is no later than in Redis if the
	// clocks run at the same pace.
	ends time.Time
	// renewedAt is when the last successful acquire or renewal was sent.
	renewedAt time.Time
	lost      bool
	leases    []*Lease // not released
	// The watchdog sets renewing while a renewal is in progress, and notBefore, which delays the
	// retry of a failed one.
	renewing  bool
	notBefore time.Time
}

// valid reports whether the owner still holds the lock, as far as this process knows.
func (h *hold) valid(now time.Time) bool { return !h.lost && !hasEnded(h.ends, now) }

// hasEnded compares both clocks: the monotonic clock stops while a machine is suspended, and the
// wall clock may be set back. A wall clock that is set ahead ends a lease early, which is safe.
func hasEnded(at, now time.Time) bool {
	return !now.Before(at) || !now.Round(0).Before(at.Round(0))
}

// watched reports whether one of the leases is renewed.
func (h *hold) watched() bool {
	return slices.ContainsFunc(h.leases, func(le *Lease) bool { return le.watched })
}

// extend records that Redis granted a lease to a call sent at that time.
func (h *hold) extend(sent time.Time, lease time.Duration) {
	if sent.After(h.renewedAt) {
		h.renewedAt = sent
	}
	if ends := sent.Add(lease - drift(lease)); ends.After(h.ends) {
		h.ends = ends
	}
}

func holdKeys(holds []*hold) []string {
	keys := make([]string, len(holds))
	for i, h := range holds {
		keys[i] = h.key
	}
	return keys
}

// releaseTimeout bounds a release, which does not end with the context of its caller.
const releaseTimeout = 5 * time.Second

// pendingRelease is one script call that releases locks without leases.
type pendingRelease struct {
	call  scriptCall
	grant *grant
	holds []*hold
}

// Release releases the lease. Locks that no other lease of the owner holds are released in Redis,
// with one round trip for every 512. It continues for up to five seconds after ctx is done, because
// a lock that is left behind blocks others until its lease ends.
//
// A *LostError names the keys that were no longer held; the others are released. After any other
// error Release may be called again and continues with the rest. Releasing twice is not an error.
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
	l := le.locker
	var failed []error
	left := le.pending[:0]
	for _, p := range le.pending {
		keys := holdKeys(p.holds)
		listens := l.waiters.mayListen(keys)
		notified, err := l.scripts.sendRelease(ctx, p.call, p.grant.owner, keys)
		if err != nil {
			left = append(left, p)
			failed = append(failed, fmt.Errorf("release %s: %w", describe(keys), err))
			continue
		}
		inRedis, lost := 0, 0
		l.mu.Lock()
		l.calls.done(p.call)
		for i, h := range p.holds {
			switch {
			case notified[i] != lostLock:
				inRedis++
				l.waiters.noteReleased(h.key, notified[i], listens[h.key])
			case !h.lost: // otherwise already reported
				lost++
				le.lost = append(le.lost, h.key)
			}
		}
		l.mu.Unlock()
		if le.active {
			l.observer.released(inRedis)
			l.observer.lost(lost)
		}
	}
	le.pending = left
	if len(left) == 0 {
		l.mu.Lock()
		delete(l.leases, le)
		l.mu.Unlock()
	}
	if len(le.lost) > 0 {
		failed = append(failed, &LostError{Keys: le.lost})
		le.lost = nil
	}
	return errors.Join(failed...)
}

// end ends the lease in this process, once. Locks without another lease become pending releases.
// Locks whose lease has ended here count as lost, even if Redis still has them.
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
		if q := l.waiters.queues[h.key]; q != nil {
			q.releasedHere = true
		}
		if le.owner.holds[h.key] == h {
			delete(le.owner.holds, h.key)
		}
		i := slices.IndexFunc(le.pending, func(p pendingRelease) bool { return p.grant == h.grant })
		if i < 0 {
			i = len(le.pending)
			le.pending = append(le.pending, pendingRelease{call: l.calls.release(h.grant), grant: h.grant})
		}
		le.pending[i].holds = append(le.pending[i].holds, h)
	}
	l.mu.Unlock()
	l.reportLost(lost, callbacks)
}

// undo releases a lease that no caller has. The caller runs as a task.
func (le *Lease) undo(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	_ = le.release(ctx, ErrReleased)
	le.retryInBackground()
}

// abandon lets the background release what is left, unless the Locker is closed. The lease must not
// be released after that.
func (le *Lease) abandon() {
	if le.locker.startTask() {
		defer le.locker.tasks.Done()
		le.retryInBackground()
	}
}

func (le *Lease) retryInBackground() {
	le.sem <- struct{}{}
	defer func() { <-le.sem }()
	l := le.locker
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range le.pending {
		l.calls.abandon(le.length, abandonedCall{call: p.call, owner: p.grant.owner, keys: holdKeys(p.holds)})
	}
	le.pending = nil
	delete(l.leases, le)
}
