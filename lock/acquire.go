package lock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Acquire takes the lock of a key and waits for it until ctx is done. Without For, the lease is
// renewed until Release. If the owner in ctx (see [Lease.Context]) holds the lock, Acquire reenters
// it without a call to Redis, unless the lease must be extended.
//
// The waiters of one process are served in order. Only the first asks Redis: when the lock is
// released, when its lease should have ended, and every WithPoll. Between processes the first to
// ask after a release gets the lock.
//
// If Redis cannot be reached, or answers that it cannot serve now (LOADING, READONLY, MASTERDOWN
// and the like), Acquire waits for it as for a busy lock and reports each attempt to
// Observer.Unreachable. Without a deadline in ctx it waits for as long as Redis is unavailable.
//
// If the deadline of ctx passes first, the error wraps ErrBusy and context.DeadlineExceeded, and
// the last error of Redis if it was unavailable. Other errors are ErrInvalid, ErrLost, ErrClosed,
// the cause of a cancelled ctx, and errors of Redis that a retry cannot fix, such as a wrong
// password. On an error, everything that the call took or may have taken is released, as soon as
// Redis can be reached.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	return l.AcquireAll(ctx, []string{key}, opts...)
}

// TryAcquire is Acquire without waiting: it returns ErrBusy if another owner holds the lock, and
// the error if Redis is unavailable.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*Lease, error) {
	lease, busy, err := l.tryAll(ctx, []string{key}, opts)
	if len(busy) > 0 {
		err = fmt.Errorf("%w: %s", ErrBusy, key)
	}
	return lease, err
}

// tryAll takes the locks of all keys without waiting, or returns which are busy.
func (l *Locker) tryAll(ctx context.Context, keys []string, opts []AcquireOption) (*Lease, []string, error) {
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := req.attempt(ctx)
	return got.lease, got.busy, err
}

// AcquireAll takes the locks of all keys in one step. It waits until no other owner holds any of
// them, or ctx is done. It holds none while it waits, so calls that name the same keys in another
// order do not deadlock. A call with many keys can be overtaken by calls with fewer. A key that is
// named twice is taken once. Everything else is as in Acquire.
func (l *Locker) AcquireAll(ctx context.Context, keys []string, opts ...AcquireOption) (*Lease, error) {
	if len(keys) > MaxKeysAtOnce {
		return nil, fmt.Errorf("%w: %d keys at once, want at most %d", ErrInvalid, len(keys), MaxKeysAtOnce)
	}
	req, err := l.newRequest(ctx, modeAll, keys, opts)
	if err != nil {
		return nil, err
	}
	return req.await(ctx)
}

// TryEach takes the lock of every key that is free, or held by the owner in ctx (see
// [Lease.Context]), and never waits. It returns a lease on these, which may be none, and the keys
// that others hold, in the order given. A key that is named twice is taken once.
//
// It costs one round trip for every 512 keys. All keys of the call have the same owner, a new one
// unless ctx has one.
//
// It returns ErrLost if the owner has lost one of the locks, because the caller relies on having
// held it all the time. It returns the other errors of TryAcquire, except ErrBusy.
func (l *Locker) TryEach(
	ctx context.Context, keys []string, opts ...AcquireOption,
) (lease *Lease, busy []string, err error) {
	req, err := l.newRequest(ctx, modeEach, keys, opts)
	if err != nil {
		return nil, nil, err
	}
	got, err := req.attempt(ctx)
	return got.lease, got.busy, err
}

// Do calls f while it holds the lock of a key. The context of f is the lease's context and ends
// when the lock is lost. The error joins the errors of f and Release.
func (l *Locker) Do(
	ctx context.Context, key string, f func(ctx context.Context) error, opts ...AcquireOption,
) (err error) {
	lease, err := l.Acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	return holding(ctx, lease, f)
}

// holding calls f and releases the lease, also if f panics.
func holding(ctx context.Context, lease interface {
	Context(ctx context.Context) context.Context
	Release(ctx context.Context) error
	abandon()
}, f func(ctx context.Context) error,
) (err error) {
	defer func() {
		if released := lease.Release(ctx); released != nil {
			lease.abandon()
			err = errors.Join(err, released)
		}
	}()
	return f(lease.Context(ctx))
}

// request is what one acquire asks for, in all its attempts.
type request struct {
	*Locker
	terms
	owner *lockOwner
	mode  string
	keys  []string
	since time.Time
	// waits is set if the request retries. Its attempts repeat one script call, for callKeys.
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
	return &request{Locker: l, terms: t, owner: l.owner(ctx), mode: mode, keys: keys, since: time.Now()}, nil
}

// validate returns the keys without duplicates.
func (l *Locker) validate(keys []string) ([]string, error) {
	if len(keys) > MaxKeys {
		return nil, fmt.Errorf("%w: %d keys, want at most %d", ErrInvalid, len(keys), MaxKeys)
	}
	for _, key := range keys {
		if err := l.validateKey(key); err != nil {
			return nil, err
		}
		if l.scripts.slot(key) != l.scripts.slot(keys[0]) {
			return nil, fmt.Errorf("%w: in a cluster, the keys of one call must share a hash tag: %q and %q do not",
				ErrInvalid, keys[0], key)
		}
	}
	if len(keys) == 1 {
		return []string{keys[0]}, nil // the caller may change its slice while this call waits
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
	clustered := l.scripts.clustered
	switch {
	case key == "" || len(key) > MaxKeyBytes:
		return fmt.Errorf("%w: a key of %d bytes, want 1 to %d", ErrInvalid, len(key), MaxKeyBytes)
	case clustered && hashTag(key) == key && strings.ContainsAny(key, "{}"):
		return fmt.Errorf("%w: in a cluster, key %q must have a hash tag or no braces: its channel would be in another slot",
			ErrInvalid, key)
	case clustered && hashTag(l.prefix) != l.prefix && hashTag(l.prefix) != hashTag(key):
		return fmt.Errorf("%w: in a cluster, key %q must have the hash tag of the prefix %q", ErrInvalid, key, l.prefix)
	}
	return nil
}
