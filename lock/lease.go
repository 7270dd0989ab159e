package lock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// releaseTimeout bounds a release, which does not end with its caller's context.
const releaseTimeout = 5 * time.Second

// Lease is a hold on some keys until a common end. Each has to be released, also after its end: only
// then does its owner know that it may take the keys anew. It is safe for concurrent use.
type Lease struct {
	owner *owner
	// ends is when the lease ends by this process's monotonic clock. It is not later than in Redis,
	// as far as both clocks run at the same pace.
	ends time.Time

	// mu guards what a release changes: held, and whether a part is released. Releases take the
	// owner's turn first, so one at a time changes it.
	mu sync.RWMutex
	// held says of every key of the lease whether it is still to be released.
	held  map[string]bool
	parts []part
}

// part is what one script call acquired, and another one releases. Each has a name of its own for
// all tries of its release.
type part struct {
	name     string
	keys     []string
	released bool
}

func (le *Lease) add(keys []string) {
	if len(keys) == 0 {
		return
	}
	if le.held == nil {
		le.held = make(map[string]bool, len(keys))
	}
	for _, key := range keys {
		le.held[key] = true
	}
	le.parts = append(le.parts, part{name: le.owner.locker.unique(), keys: keys})
}

// Keys returns the keys that the lease was given, in the order in which they were asked for.
func (le *Lease) Keys() []string {
	le.mu.RLock()
	defer le.mu.RUnlock()
	var keys []string
	for _, p := range le.parts {
		keys = append(keys, p.keys...)
	}
	return keys
}

// Holds tells whether the lease was given this key, has not released it, and has not ended. It asks
// the clock and not Redis, so a lock that Redis lost shows only in Release.
func (le *Lease) Holds(key string) bool {
	le.mu.RLock()
	defer le.mu.RUnlock()
	return le.held[key] && time.Now().Before(le.ends)
}

// Context returns a context that carries the owner of the lease. With it, TryEach of the same Locker
// takes a key that the owner holds once more, and the key is free when each of these leases is
// released, in whatever order. Goroutines that share such a context share the lock: they exclude
// others, and not each other.
func (le *Lease) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, ownerKey{le.owner.locker}, le.owner)
}

// Release gives up the hold on all keys, in one round trip for every 512 of them. It goes on when ctx
// is done, for at most five seconds, because a lock that is left behind keeps others waiting until
// its lease ends.
//
// A *LostError names the keys that were not held any more; the others are released. After any other
// error Release may be called again, and goes on with what is left. To release twice is no error.
func (le *Lease) Release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if err := le.owner.enter(ctx); err != nil {
		return fmt.Errorf("release locks: %w", err)
	}
	defer le.owner.leave()

	var lost []string
	var failed []error
	for i := range le.parts {
		p := &le.parts[i]
		if p.released {
			continue
		}
		answers, err := le.owner.release(ctx, p.name, p.keys, 1)
		if err != nil {
			failed = append(failed, fmt.Errorf("release %d locks: %w", len(p.keys), err))
			continue
		}
		for i, key := range p.keys {
			if answers[i] == answerLost {
				lost = append(lost, key)
			}
		}
		le.owner.count(p.keys, -1)
		le.settle(p)
	}
	if len(lost) > 0 {
		failed = append(failed, &LostError{Keys: lost})
	}
	return errors.Join(failed...)
}

func (le *Lease) settle(p *part) {
	le.mu.Lock()
	defer le.mu.Unlock()
	p.released = true
	for _, key := range p.keys {
		le.held[key] = false
	}
}
