package lock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Acquire takes the lock of a key, and waits for it until ctx is done. Without For, the lease is renewed
// until it is released. An owner in ctx (see [Lease.Context]) that holds the lock goes deeper into it,
// without asking Redis unless the lock has to last longer for it.
//
// Those who wait in one process are served in order, and only the first of them asks Redis: when the
// lock is released, when its lease has run out, and after the time of WithPoll. Between processes, the
// first to ask after a release is served.
//
// A Redis that cannot be reached, or says that it cannot serve now (LOADING, READONLY, MASTERDOWN and the like),
// is waited for as a lock that is busy; Observer.Unreachable tells of it. So without a deadline in ctx, Acquire
// waits as long as Redis is away.
//
// If the deadline of ctx passes first, the error wraps both ErrBusy and context.DeadlineExceeded and, if Redis
// could not be asked at last, why. On an error, whatever the call has or may have taken is given back; if Redis
// cannot be reached for that either, as soon as it can. Other errors are ErrInvalid, ErrLost, ErrClosed, the
// cause of a ctx that was cancelled, and what Redis answers to a call that no repeat mends, as to a wrong password.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	req, err := l.newRequest(ctx, modeAll, []string{key}, opts)
	if err != nil {
		return nil, err
	}
	return l.await(ctx, req)
}

// TryAcquire is Acquire that does not wait: ErrBusy tells that another owner holds the lock. It does not wait
// for Redis either, and returns the error.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	req, err := l.newRequest(ctx, modeAll, []string{key}, opts)
	if err != nil {
		return nil, err
	}
	got, err := l.attempt(ctx, req)
	switch {
	case err != nil:
		return nil, err
	case len(got.busy) > 0:
		return nil, fmt.Errorf("%w: %s", ErrBusy, key)
	}
	return got.lease, nil
}

// AcquireAll takes the locks of all keys in one step, and waits until none of them is held by another
// owner or ctx is done. It holds none while it waits, so those who take the same keys in another order
// do not block each other; and one that wants many keys can be overtaken for as long as others want
// some of them. A key that is named twice is taken once. Otherwise it is as Acquire.
func (l *Locker) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*Lease, error) {
	if len(keys) > MaxKeysAtOnce {
		return nil, fmt.Errorf("%w: %d keys at once, want at most %d", ErrInvalid, len(keys), MaxKeysAtOnce)
	}
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, err
	}
	return l.await(ctx, req)
}

// TryEach takes the lock of every key that is free, or held by the owner in ctx (see [Lease.Context]),
// and never waits: it returns a lease on those that it got, which may be none, and the keys that others
// hold, in the order given. A key that is named twice is taken once.
//
// It costs one round trip for every 512 keys. All keys of the call have the same owner; without one
// in ctx that is a new one.
//
// Going deeper into a lock that the owner has lost is refused, because whoever does it counts on
// having been alone all the while. Errors are as those of TryAcquire, without ErrBusy.
func (l *Locker) TryEach(ctx context.Context, keys []string, opts ...AcquireOption) (lease *Lease, busy []string, err error) {
	req, err := l.newRequest(ctx, modeEach, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := l.attempt(ctx, req)
	return got.lease, got.busy, err
}

// Do calls f with the lock of a key held, and the lease's context: it ends when the lock is lost. The
// error joins that of f and, if the lock was lost or could not be released, of Release.
func (l *Locker) Do(ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption) (err error) {
	lease, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	defer func() { // also if f panics
		if released := lease.Release(ctx); released != nil {
			lease.abandon()
			err = errors.Join(err, released)
		}
	}()
	return f(lease.Context(ctx))
}

// asking is what one acquire asks for, however often it has to.
type request struct {
	terms
	owner *owner
	mode  string
	keys  []string
	since time.Time
	// waits is set for one that asks again and again, by the same call: asked is what that was for.
	waits    bool
	call     *grant
	callKeys []string
}

func (l *Locker) newRequest(ctx context.Context, mode string, keys []string, opts []AcquireOption) (*request, error) {
	t, err := l.terms(opts)
	if err != nil {
		return nil, err
	}
	if l.clientErr != nil {
		return nil, l.clientErr
	}
	if keys, err = l.validate(keys); err != nil {
		return nil, err
	}
	return &request{terms: t, owner: l.owner(ctx), mode: mode, keys: keys, since: time.Now()}, nil
}

// validate returns the keys without those that were named before.
func (l *Locker) validate(keys []string) ([]string, error) {
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%w: %d keys, want at most %d", ErrInvalid, len(keys), MaxKeys)
	}
	for _, key := range keys {
		if err := l.validateKey(key); err != nil {
			return nil, err
		}
		if l.clustered && hashTag(key) != hashTag(keys[0]) {
			return nil, fmt.Errorf("%w: in a cluster, keys of one call have to share a hash tag: %q and %q do not", ErrInvalid, keys[0], key)
		}
	}
	if len(keys) == 1 {
		return []string{keys[0]}, nil // the caller may change its own while this one waits
	}
	once := make([]string, 0, len(keys))
	seen := make(map[string]struct{}, len(keys))
	for _, key := range keys {
		if _, again := seen[key]; !again {
			seen[key] = struct{}{}
			once = append(once, key)
		}
	}
	return once, nil
}

func (l *Locker) validateKey(key string) error {
	switch {
	case key == "" || len(key) > MaxKeyBytes:
		return fmt.Errorf("%w: a key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKeyBytes)
	case l.clustered && hashTag(key) == key && strings.ContainsAny(key, "{}"):
		return fmt.Errorf("%w: in a cluster, key %q has to have a hash tag, or no braces: its channel would lie in another slot", ErrInvalid, key)
	case l.clustered && hashTag(l.prefix) != l.prefix && hashTag(l.prefix) != hashTag(key):
		return fmt.Errorf("%w: in a cluster, key %q has to have the hash tag of the prefix %q", ErrInvalid, key, l.prefix)
	}
	return nil
}
