package lock_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
	"stampede/lua"
)

// setupLossy returns a bench whose Locker uses the proxy. The bench itself reads Redis directly.
func setupLossy(t *testing.T, opts ...lock.Option) (bench, *testkit.LossyProxy) {
	t.Helper()
	t.Parallel()
	proxy, rdb, direct := testkit.RedisThroughProxy(t)
	b := setupOn(t, direct)
	b.Locker = newLocker(t, rdb, opts...)
	// Otherwise the lost answer would be a NOSCRIPT.
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew, lua.LockForce} {
		require.NoError(t, script.Load(t.Context(), b.rdb).Err())
	}
	return b, proxy
}

func TestReleaseWithLostAnswersIsNotALoss(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.Del(ctx, b.key("bob")).Err())

	proxy.Lose(3)
	err := outer.Release(ctx)
	proxy.RequireLost(t)
	require.Equal(t, []string{b.key("bob")}, lostKeys(t, err), "only what was lost before the first attempt")
	assert.Equal(t, 1, b.depth(b.key("ann")), "the inner lease holds it")

	proxy.Lose(3)
	require.NoError(t, inner.Release(ctx))
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAcquireOfUnknownOutcomeIsReleased(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))

	proxy.Lose(4) // all attempts of go-redis
	_, _, err := b.TryEach(outer.Context(ctx), []string{b.key("ann"), b.key("bob")}, lock.For(time.Second))
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	assert.Equal(t, 1, b.depth(b.key("ann")), "the owner keeps what it held before")
	require.NoError(t, outer.Release(ctx))
}

func TestReleaseOfUnknownOutcomeMayBeRepeated(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	names := b.names(600) // two script calls
	lease := b.take(ctx, time.Minute, names...)

	proxy.Lose(4)
	err := lease.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	require.ErrorIs(t, lease.Err(), lock.ErrReleased)
	assert.Zero(t, b.depth(names[599]), "released by the call that was answered")

	require.NoError(t, lease.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}

// callTries is how often go-redis sends a call.
const callTries = 4

func TestLostAnswersAreNotALossForAnyAcquire(t *testing.T) {
	for name, acquire := range map[string]func(b bench, keys []string) (*lock.Lease, error){
		"Acquire": func(b bench, keys []string) (*lock.Lease, error) {
			return b.Acquire(b.t.Context(), keys[0])
		},
		"TryAcquire": func(b bench, keys []string) (*lock.Lease, error) {
			return b.TryAcquire(b.t.Context(), keys[0])
		},
		"AcquireAll": func(b bench, keys []string) (*lock.Lease, error) {
			return b.AcquireAll(b.t.Context(), keys)
		},
		"TryEach": func(b bench, keys []string) (*lock.Lease, error) {
			lease, _, err := b.TryEach(b.t.Context(), keys)
			return lease, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, proxy := setupLossy(t)
			ctx := t.Context()
			keys := b.names(3)
			proxy.Lose(callTries - 1)
			lease, err := acquire(b, keys)
			require.NoError(t, err)
			proxy.RequireLost(t)
			for _, key := range lease.Keys() {
				assert.Equal(t, 1, b.depth(key))
			}
			_, err = b.TryAcquire(ctx, keys[0])
			require.ErrorIs(t, err, lock.ErrBusy)
			require.NoError(t, lease.Err())
			require.NoError(t, lease.Release(ctx))
			assert.Zero(t, b.depth(keys[0]))

			proxy.Lose(callTries)
			lease, err = acquire(b, keys)
			proxy.RequireLost(t)
			if strings.HasPrefix(name, "Try") {
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrLost, "it never had the lock")
				assert.Nil(t, lease)
			} else { // it retries the same call
				require.NoError(t, err)
				assert.Equal(t, 1, b.depth(keys[0]))
				require.NoError(t, lease.Release(ctx))
			}
			left, err := b.rdb.Exists(ctx, keys...).Result()
			require.NoError(t, err)
			assert.Zero(t, left, "what may have been taken is released")
		})
	}
}

func TestBusyAnswerMayBeLost(t *testing.T) {
	var o observed
	b, proxy := setupLossy(t, o.option(t))
	ctx := t.Context()
	held, err := newLocker(t, b.rdb).Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	proxy.Lose(callTries - 1)
	_, err = b.TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, lock.ErrBusy)
	proxy.RequireLost(t)
	proxy.Lose(callTries - 1)
	ctx, cancel := context.WithCancel(ctx)
	given := make(chan error, 1)
	go func() {
		_, err := b.AcquireAll(ctx, []string{b.key("bob"), b.key("ann")})
		given <- err
	}()
	testkit.Eventually(t, startsWithin, "an answer comes", func() bool { return o.snapshot().Busy > 1 })
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	cancel()
	require.ErrorIs(t, await(t, given, startsWithin, "the end of the wait"), context.Canceled)
	require.NoError(t, held.Err())
	require.NoError(t, held.Release(t.Context()), "the holder keeps its lock")
	assert.Zero(t, b.depth(b.key("bob")))
}

// Only the release can wake the waiter.
func TestWaiterWithLostAnswersTakesTheLockOnce(t *testing.T) {
	for name, lost := range map[string]int32{"all but the last": callTries - 1, "all": callTries} {
		t.Run(name, func(t *testing.T) {
			var o observed
			b, proxy := setupLossy(t, lock.WithPoll(never), o.option(t))
			ctx, key := t.Context(), b.key("ann")
			direct := newLocker(t, b.rdb, lock.WithPoll(never))
			held, err := direct.Acquire(ctx, key, lock.For(lock.MaxLease))
			require.NoError(t, err)
			waiting := acquiring(t, b.Locker, key)
			b.waitListening(key, 1)
			testkit.Eventually(t, startsWithin, "an attempt after the subscription", func() bool {
				return o.snapshot().Busy == 2
			})

			proxy.Lose(lost)
			require.NoError(t, held.Release(ctx))
			got := await(t, waiting, startsWithin, "the lock")
			proxy.RequireLost(t)
			assert.Equal(t, 1, b.depth(key), "taken once by several attempts")
			require.NoError(t, got.Release(ctx))
			next, err := direct.TryAcquire(ctx, key)
			require.NoError(t, err, "the lock is free")
			require.NoError(t, next.Release(ctx))
			assert.Zero(t, o.snapshot().Lost)
		})
	}
}

func TestRenewalWithLostAnswersIsRetriedInTime(t *testing.T) {
	const length = 5 * time.Second
	var o observed
	b, proxy := setupLossy(t, lock.WithLease(length), o.option(t))
	ctx := t.Context()
	ann, bob := b.key("ann"), b.key("bob")
	lease, err := b.AcquireAll(ctx, []string{ann, bob})
	require.NoError(t, err)
	held, granted := lease.Context(ctx), b.expiry(ann)
	proxy.Lose(callTries)
	testkit.Eventually(t, startsWithin, "a failed renewal", func() bool { return o.snapshot().Failed > 0 })
	proxy.Lose(0) // on a busy machine the call fails before its last attempt
	testkit.Eventually(t, startsWithin, "a successful renewal", func() bool { return o.snapshot().Renewed > 0 })
	require.NoError(t, lease.Err())
	testkit.Eventually(t, startsWithin, "the end of the first lease", func() bool { return b.now().After(granted) })
	require.NoError(t, lease.Err())
	require.NoError(t, held.Err())
	assert.Equal(t, 2, o.snapshot().Failed, "one call for two locks")
	assert.Zero(t, o.snapshot().Lost)
	require.NoError(t, lease.Release(ctx))
	assert.Zero(t, b.depth(ann))
}

// It takes the lock from its holder only.
func TestForceReleaseWithLostAnswersReleasesTheLock(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	proxy.Lose(callTries - 1)
	_, err := b.ForceRelease(ctx, b.key("ann"))
	require.NoError(t, err)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("ann")))

	proxy.Lose(callTries)
	_, err = b.ForceRelease(ctx, b.key("bob"))
	require.Error(t, err, "the outcome is unknown")
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	require.Equal(t, []string{b.key("ann"), b.key("bob")}, lostKeys(t, lease.Release(ctx)))
}
