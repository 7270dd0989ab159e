//go:build system

package lock_test

import (
	"context"
	mathrand "math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestCloseWithoutRedisEndsLeasesAndReturnsOnDeadline(t *testing.T) {
	for name, hangs := range map[string]bool{"Redis is killed": false, "Redis hangs": true} {
		t.Run(name, func(t *testing.T) {
			server, b := ownServer(t)
			const leases = 64 // more than Close releases at the same time
			l := lock.New(b.rdb, lock.WithLease(lock.MaxLease))
			inside := make([]context.Context, leases)
			names := b.names(leases)
			for i, key := range names {
				lease, err := l.Acquire(t.Context(), key)
				require.NoError(t, err)
				inside[i] = lease.Context(t.Context())
			}
			if hangs {
				server.Freeze()
			} else {
				server.Kill()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			closed := make(chan error, 1)
			go func() { closed <- l.Close(ctx) }()
			err := await(t, closed, startsWithin, "Close returns") // the client's timeout is 3 s, for several attempts
			require.Error(t, err)
			require.NotErrorIs(t, err, lock.ErrLost, "the outcome is unknown")
			if hangs {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			for _, held := range inside {
				require.ErrorIs(t, context.Cause(held), lock.ErrClosed, "its holder does not wait for Redis")
			}
			_, err = l.Acquire(t.Context(), names[0])
			require.ErrorIs(t, err, lock.ErrClosed)
			if hangs {
				server.Thaw()
				testkit.Eventually(t, startsWithin, "Redis answers again", func() bool {
					return b.rdb.Ping(t.Context()).Err() == nil
				})
			}
		})
	}
}

func TestCloseRetriesFailedReleases(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	l := lock.New(b.rdb)
	lease, err := l.Acquire(ctx, b.key("ann"), lock.For(lock.MaxLease))
	require.NoError(t, err)
	server.Kill()
	require.Error(t, lease.Release(ctx))
	require.NoError(t, server.Restart(ctx))
	require.Equal(t, 1, b.depth(b.key("ann")), "this Redis writes every command to disk")
	require.NoError(t, l.Close(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestDoReleasesItsLockAfterAnOutage(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	err := b.Do(ctx, b.key("ann"), func(context.Context) error {
		server.Kill()
		return nil
	}, lock.For(lock.MaxLease))
	require.Error(t, err)
	require.NoError(t, server.Restart(ctx))
	testkit.Eventually(t, startsWithin, "the lock is released", func() bool { return b.depth(b.key("ann")) == 0 })
}

func TestAcceptedIncrementsAllCount(t *testing.T) {
	b, seed := setup(t), mathrand.Uint64()
	t.Logf("seed=%d", seed)
	r := crowd(b, testkit.Pool(t), seed, 12, 25, 12)
	t.Logf("%d increments accepted, %d requests refused", r.accepted, r.refused)
	assert.Equal(t, r.accepted, r.value(t))
	assert.Positive(t, r.refused, "no client was late: the test shows nothing")
}

func TestLockerLeavesFewKeysWithExpiry(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	prefix := b.key("locker")
	b.Locker = newLocker(t, b.rdb, lock.WithPrefix(prefix))
	for range 20 {
		outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
		_, err := b.TryAcquire(ctx, b.key("ann"))
		require.ErrorIs(t, err, lock.ErrBusy)
		inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
		require.NoError(t, outer.Release(ctx))
		require.NoError(t, inner.Release(ctx))
	}

	left, err := b.rdb.Keys(ctx, prefix+"*").Result()
	require.NoError(t, err)
	assert.Contains(t, left, prefix+":fence")
	assert.Len(t, left, 3, "receipts are reused: %v", left)
	for _, key := range left {
		ttl := b.rdb.PTTL(ctx, key).Val()
		assert.Positive(t, ttl, key)
		assert.LessOrEqual(t, ttl, 24*time.Hour, key)
	}
}

func TestTryEachTakesOneCallForEvery512Keys(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	var calls atomic.Int64
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			calls.Add(1)
		}
		return next(ctx, cmd)
	}))
	names := b.names(10_000)
	other := b.take(ctx, time.Minute, names[9_999])

	calls.Store(0)
	lease, busy, err := b.TryEach(ctx, names, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{names[9_999]}, busy)
	assert.Equal(t, names[:9_999], lease.Keys())
	assert.EqualValues(t, 20, calls.Load())

	require.NoError(t, lease.Release(ctx))
	assert.LessOrEqual(t, calls.Load(), int64(41), "and one NOSCRIPT at most")
	require.NoError(t, other.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}

// The leases are held for longer than their length. Two rounds of renewals are at least a twentieth
// of the lease apart, on any machine, because a round includes what is due in that time. Only the
// last call of a round names fewer than 256 locks.
func TestTenThousandLeasesNeedFewCallsAndGoroutines(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const (
		locks, callers  = 10_000, 16
		length          = 8 * time.Second
		renewalsPerCall = 256
		closeCalls      = 16
		together        = length / 20
		// due is the shortest time between two renewals of a lock: a third of the lease, less the
		// drift and the batch window.
		due = length/3 - length/100 - 2*time.Millisecond - together
	)
	c := countCalls(t, b.rdb)
	var underWay, atOnce atomic.Int64 // releases
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			now := underWay.Add(1)
			defer underWay.Add(-1)
			for was := atOnce.Load(); now > was && !atOnce.CompareAndSwap(was, now); was = atOnce.Load() {
			}
		}
		return next(ctx, cmd)
	})
	l := newLocker(t, b.rdb, lock.WithLease(length))
	names := b.names(locks)
	leases := make([]*lock.Lease, locks)
	var all sync.WaitGroup
	for caller := range callers {
		all.Go(func() {
			for i := caller; i < locks; i += callers {
				var err error
				if leases[i], err = l.Acquire(ctx, names[i]); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	require.False(t, t.Failed())
	held := leases[0].Context(ctx)

	began, before := time.Now(), len(c.renewedKeys())
	goroutines := 0
	testkit.Eventually(t, length+startsWithin, "a whole lease", func() bool {
		goroutines = max(goroutines, runtime.NumGoroutine()) // of all running tests
		return time.Since(began) > length
	})
	sizes := c.renewedKeys()
	window := time.Since(began)
	for _, lease := range leases {
		require.NoError(t, lease.Err())
	}
	require.NoError(t, held.Err())
	there, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	require.EqualValues(t, locks, there)
	assert.Less(t, goroutines, locks/4)

	calls, keys := len(sizes)-before, 0
	for _, size := range sizes[before:] {
		keys += size
	}
	t.Logf("%d calls for %d renewals in %v, %d goroutines", calls, keys, window, goroutines)
	assert.LessOrEqual(t, slices.Max(sizes), renewalsPerCall)
	assert.GreaterOrEqual(t, keys, locks, "each at least once in a lease")
	assert.LessOrEqual(t, keys, locks*int(window/due+2), "about every third of a lease at most")
	rounds := int(window/together) + 3 // the window cuts the rounds at its ends
	assert.LessOrEqual(t, calls, keys/renewalsPerCall+rounds)

	if err := l.Close(ctx); err != nil { // on a slow machine, some leases end before their release
		require.ErrorIs(t, err, lock.ErrLost)
	}
	assert.Equal(t, locks, c.calls(releaseCalls))
	assert.LessOrEqual(t, atOnce.Load(), int64(closeCalls), "Close leaves connections for others")
	there, err = b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, there)
	require.ErrorIs(t, context.Cause(held), lock.ErrClosed)
}
