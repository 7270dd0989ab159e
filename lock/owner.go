package lock

import (
	"context"
	"slices"
	"time"
)

// owner is who holds locks: one acquire, and every further one with a context of its leases.
type owner struct {
	// turn is taken for the time of a script call, and is nil while nobody shares the owner: who goes deeper
	// into a lock while it is being taken waits for the outcome. It is a channel so that a caller can give up
	// waiting for it.
	sem chan struct{}
	// holds are what an owner that is shared holds, or lost and did not release, by key. Guarded by Locker.mu.
	holds map[string]*hold
}

// ownerKey finds the owner in a context. It holds the Locker because the owner of a lock in one
// Redis owns nothing in another.
type ownerKey struct{ *Locker }

func (l *Locker) owner(ctx context.Context) *owner {
	if o, ok := ctx.Value(ownerKey{l}).(*owner); ok {
		return o
	}
	return &owner{}
}

func (o *owner) enter(ctx context.Context) error {
	if ctx.Err() != nil { // select would choose by lot
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

func (o *owner) leave() {
	if o.sem != nil {
		<-o.sem
	}
}

// share makes the owner one that others know, who find what it holds. It needs Locker.mu.
func (o *owner) share(holds []*hold) {
	if o.sem != nil {
		return
	}
	o.sem = make(chan struct{}, 1)
	o.holds = make(map[string]*hold, len(holds))
	for _, h := range holds {
		o.holds[h.key] = h
	}
}

// part is what one script call took. Redis knows its locks by an owner of their own, because whatever
// goes deeper into them is counted here and not there.
type grant struct {
	owner string
	token int64
	// taken is the call that took the locks. Its receipt goes to the first call that releases some of
	// them, so that a late try of the acquire finds it.
	acquireCall  call
	receiptMoved bool // a release has taken over the receipt
}

// hold is one lock that an owner has, however many of its leases hold it. Guarded by Locker.mu.
type hold struct {
	*grant
	key string
	// ends is when the lease ends by this process's clocks. It is not later than in Redis, as far as
	// the clocks run at the same pace.
	ends time.Time
	// asked is when Redis was last asked to keep the lock, and did.
	renewedAt time.Time
	lost      bool
	leases    []*Lease // that are not released
	alarm              // of the watchdog
}

// good tells whether the owner still has the lock, as far as this process can know.
func (h *hold) valid(now time.Time) bool { return !h.lost && !hasEnded(h.ends, now) }

// ended looks at both clocks of the process: the monotonic one stands still while a machine is
// suspended, and the wall clock may be set back. If the latter is set ahead, a good lease is taken for
// one that has ended, which does no harm.
func hasEnded(at, now time.Time) bool {
	return !now.Before(at) || !now.Round(0).Before(at.Round(0))
}

// watched tells whether a lease that is to be kept up holds the lock.
func (h *hold) watched() bool {
	return slices.ContainsFunc(h.leases, func(le *Lease) bool { return le.watched })
}

// lengthen notes that Redis keeps the lock for a lease that was asked for at a time.
func (h *hold) extend(sent time.Time, lease time.Duration) {
	if sent.After(h.renewedAt) {
		h.renewedAt = sent
	}
	if ends := sent.Add(lease - drift(lease)); ends.After(h.ends) {
		h.ends = ends
	}
}
