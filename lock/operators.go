package lock

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// Holding describes the holder of a lock at the time of a Look. The zero value is a free lock.
type Holding struct {
	// Owner is the name of the holder in Redis: "<id of the Locker>:<number of the call>", or
	// Redisson's "<id of the client>:<id of the thread>".
	Owner string
	// Depth is how many releases free the lock. Lockers count reentries in their process, so it is
	// 1 for a lock of another Locker. Redisson counts in Redis.
	Depth int
	// Left is what is left of the lease, which the holder may renew. It is 0 for a lock without
	// expiry, which neither a Locker nor Redisson creates.
	Left time.Duration
	// Mine is set if this Locker holds the lock.
	Mine bool
}

// Held reports whether the lock is held.
func (h Holding) Held() bool { return h.Owner != "" }

// scanCount bounds the fields that are read. A lock has one field.
const scanCount = 10

// Look reports who holds the lock of a key and for how long, for operators and logs. The answer may
// be outdated when it arrives. Look changes nothing and returns the error if Redis is unavailable.
// For a lock of another kind, such as Redisson's read lock, it reports one of the holders.
func (l *Locker) Look(ctx context.Context, key string) (Holding, error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return Holding{}, err
	}
	var fields *redis.ScanCmd
	var left *redis.DurationCmd
	_, err := l.scripts.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error { // in one step
		fields = tx.HScan(ctx, key, 0, "", scanCount)
		left = tx.PTTL(ctx, key)
		return nil
	})
	if err != nil {
		return Holding{}, fmt.Errorf("look at lock %s: %w", key, err)
	}
	var h Holding
	page, _ := fields.Val()
	for i := 0; i+1 < len(page) && !h.Held(); i += 2 {
		if depth, err := strconv.Atoi(page[i+1]); err == nil { // other fields name the kind of lock
			h = Holding{Owner: page[i], Depth: depth, Left: max(0, left.Val())}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for le := range l.leases {
		if mine := le.byKey[key]; mine != nil && mine.owner == h.Owner {
			h.Depth, h.Mine = len(mine.leases), true
		}
	}
	return h, nil
}

// ForceRelease takes the lock of a key from its holder, which may be in another process or a Java
// service, wakes the waiters, and reports whether it was held. The holder learns of the loss when
// it next renews or releases the lock. It is for operators: the lock of a dead process ends by
// itself.
func (l *Locker) ForceRelease(ctx context.Context, key string) (held bool, err error) {
	if err := cmp.Or(l.clientErr, l.validateKey(key)); err != nil {
		return false, err
	}
	l.mu.Lock()
	c := l.calls.next()
	l.mu.Unlock()
	held, err = l.scripts.sendForce(ctx, c, key)
	open := l.startTask()
	if open {
		defer l.tasks.Done()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.calls.done(c)
		return held, nil
	case open:
		// If the call is still in progress, it must not take the lock from a later holder.
		l.calls.abandon(0, abandonedCall{call: l.calls.nextOn(c.receipt), owner: "none", keys: []string{key}})
	}
	return false, fmt.Errorf("force the release of lock %q: %w", key, err)
}
