package lock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

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
