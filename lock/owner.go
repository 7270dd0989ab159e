package lock

import (
	"context"
	"slices"
	"time"
)

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
