package lock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/lock"
	"stampede/lua"
)

// setupLossy gives a bench whose Locker speaks through the proxy, while the bench itself looks at Redis directly.
func setupLossy(t *testing.T) (bench, *testkit.LossyProxy) {
	t.Helper()
	b := setup(t)
	proxy, rdb := testkit.RedisThroughProxy(t)
	b.Locker = locker(t, rdb)
	// A script that Redis does not know yet answers NOSCRIPT, and that would be the answer to lose.
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew} {
		require.NoError(t, script.Load(t.Context(), b.rdb).Err())
	}
	return b, proxy
}

func TestAnAcquireWhoseAnswerIsLostIsNoDeeper(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	proxy.Lose(3)
	lease := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	proxy.RequireLost(t)
	assert.Equal(t, 1, b.depth(b.key("ann")))

	proxy.Lose(3)
	other, busy, err := b.TryEach(ctx, []string{b.key("ann"), b.key("cid")}, lock.For(time.Minute))
	require.NoError(t, err)
	proxy.RequireLost(t)
	assert.Equal(t, []string{b.key("ann")}, busy)
	assert.Equal(t, 1, b.depth(b.key("cid")))

	require.NoError(t, lease.Release(ctx))
	require.NoError(t, other.Release(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
	assert.Zero(t, b.depth(b.key("cid")))
}

func TestAReleaseWhoseAnswerIsLostIsNoLoss(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.Del(ctx, b.key("bob")).Err())

	proxy.Lose(3)
	err := outer.Release(ctx)
	proxy.RequireLost(t)
	require.Equal(t, []string{b.key("bob")}, lostKeys(t, err), "only what was lost before the first try")
	assert.Equal(t, 1, b.depth(b.key("ann")), "the inner lease holds it")

	proxy.Lose(3)
	require.NoError(t, inner.Release(ctx))
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestARenewalWhoseAnswerIsLostIsNoLoss(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))
	proxy.Lose(3)
	inner := b.take(outer.Context(ctx), 10*time.Minute, b.key("ann"))
	proxy.RequireLost(t)
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), 9*time.Minute)
	require.NoError(t, inner.Release(ctx))
	require.NoError(t, outer.Release(ctx))
}

func TestAnAcquireOfUnknownOutcomeIsGivenBack(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))

	proxy.Lose(4) // go-redis tries four times in all
	_, _, err := b.TryEach(outer.Context(ctx), []string{b.key("ann"), b.key("bob")}, lock.For(time.Second))
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	assert.Equal(t, 1, b.depth(b.key("ann")), "what the owner held before, it still holds")
	require.NoError(t, outer.Release(ctx))
}

func TestAReleaseOfUnknownOutcomeMayBeRepeated(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	names := b.names(600) // in two calls
	lease := b.take(ctx, time.Minute, names...)

	proxy.Lose(4)
	err := lease.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	require.ErrorIs(t, lease.Err(), lock.ErrReleased)
	assert.Zero(t, b.depth(names[599]), "the call that got through has released")

	require.NoError(t, lease.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}
