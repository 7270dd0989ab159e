package lock

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// giveBackTimeout is short because a caller waits who has an error already, and a Redis that did not
// answer will hardly do so now.
const giveBackTimeout = time.Second

// TryEach takes the lock of every key that is free, or held by the owner in ctx (see
// [Lease.Context]), and never waits: it returns a lease on those that it got, which may be none, and
// the keys that others hold, in the order given. A key that is named twice is taken once.
//
// It costs one round trip for every 512 keys. All keys of the call have the same owner; without one
// in ctx that is a new one. The lease is cut to whole milliseconds and counts from before the first
// key was asked for.
//
// Going deeper into a lock that the owner has lost is refused, because whoever does it counts on
// having been alone all the while. On an error, whatever the call has or may have taken is given back;
// if Redis cannot be reached for that either, it is free when the lease ends. Errors are ErrInvalid,
// ErrLost, that of ctx, and those of Redis.
func (l *Locker) TryEach(ctx context.Context, keys []string, lease time.Duration) (*Lease, []string, error) {
	keys, err := validate(keys, lease)
	if err != nil {
		return nil, nil, err
	}
	lease = lease.Truncate(time.Millisecond)
	o := l.owner(ctx)
	if err := o.enter(ctx); err != nil {
		return nil, nil, fmt.Errorf("lock %d keys: %w", len(keys), err)
	}
	defer o.leave()

	got := &Lease{owner: o, ends: time.Now().Add(lease)}
	var busy, lost []string
	asked := 0
	for chunk := range slices.Chunk(keys, keysPerCall) {
		var answers []string
		asked += len(chunk)
		if answers, err = o.acquire(ctx, chunk, lease); err != nil {
			break
		}
		var held []string
		for i, key := range chunk {
			switch answers[i] {
			case answerHeld:
				held = append(held, key)
			case answerBusy:
				busy = append(busy, key)
			case answerLost:
				lost = append(lost, key)
			}
		}
		got.add(held)
	}
	if err == nil && len(lost) == 0 && !time.Now().Before(got.ends) {
		lost = got.Keys()
	}
	if err == nil && len(lost) > 0 {
		err = &LostError{Keys: lost}
	}
	if err != nil {
		o.giveBack(ctx, keys[:asked])
		return nil, nil, fmt.Errorf("lock %d keys: %w", len(keys), err)
	}
	for _, p := range got.parts {
		o.count(p.keys, 1)
	}
	return got, busy, nil
}

// giveBack undoes an acquire of which it is not known what it took. Its own errors are of no use to
// anybody: what they leave ends with its lease.
func (o *owner) giveBack(ctx context.Context, keys []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	for chunk := range slices.Chunk(keys, keysPerCall) {
		if _, err := o.release(ctx, o.locker.unique(), chunk, 0); err != nil {
			return
		}
	}
}

// validate returns the keys without those that were named before.
func validate(keys []string, lease time.Duration) ([]string, error) {
	if lease < MinLease || lease > MaxLease {
		return nil, fmt.Errorf("%w: a lease of %v, want %v to %v", ErrInvalid, lease, MinLease, MaxLease)
	}
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%w: %d keys, want at most %d", ErrInvalid, len(keys), MaxKeys)
	}
	once := make([]string, 0, len(keys))
	seen := make(map[string]struct{}, len(keys))
	for _, key := range keys {
		if key == "" || len(key) > MaxKeyBytes {
			return nil, fmt.Errorf("%w: a key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKeyBytes)
		}
		if _, again := seen[key]; !again {
			seen[key] = struct{}{}
			once = append(once, key)
		}
	}
	return once, nil
}
