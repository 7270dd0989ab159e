//go:build system

package lock_test

import (
	"context"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
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

// Where many processes receive a message, most do not ask immediately. In some of these hand-overs
// none does.
func TestWaitersOfManyProcessesAreNotMissedAfterARelease(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const processes, rounds = 12, 12
	c := countCalls(t, b.rdb)
	lockers := make([]*lock.Locker, processes)
	for i := range lockers {
		lockers[i] = newLocker(t, b.rdb, lock.WithPoll(never))
	}
	for round := range rounds {
		key := b.key(fmt.Sprint(round))
		holder, err := b.Acquire(ctx, key, lock.For(never))
		require.NoError(t, err)
		before := c.of(acquireCalls)
		got := make([]<-chan *lock.Lease, processes)
		for i, l := range lockers {
			got[i] = acquiring(t, l, key)
		}
		b.waitListening(key, processes)
		testkit.Eventually(t, startsWithin, "two attempts of each", func() bool {
			return c.of(acquireCalls) >= before+2*processes
		})
		require.NoError(t, holder.Release(ctx))
		for range got {
			require.NoError(t, b.firstOf(got).Release(ctx))
		}
	}
}
