package lock_test

import (
	"testing"
	"time"

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
	b.Locker = lock.New(rdb)
	// A script that Redis does not know yet answers NOSCRIPT, and that would be the answer to lose.
	require.NoError(t, lua.LockAcquire.Load(t.Context(), b.rdb).Err())
	require.NoError(t, lua.LockRelease.Load(t.Context(), b.rdb).Err())
	return b, proxy
}

func TestAnAcquireWhoseAnswerIsLostIsNoDeeper(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	proxy.Lose(3)
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	proxy.RequireLost(t)
	assert.Equal(t, 1, b.depth(b.key("ann")))

	proxy.Lose(2)
	inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	proxy.RequireLost(t)
	assert.Equal(t, 2, b.depth(b.key("ann")))

	require.NoError(t, inner.Release(ctx))
	require.NoError(t, outer.Release(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAReleaseWhoseAnswerIsLostIsNoLoss(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.Del(ctx, b.key("bob")).Err())

	proxy.Lose(3)
	require.NoError(t, inner.Release(ctx))
	proxy.RequireLost(t)
	assert.Equal(t, 1, b.depth(b.key("ann")), "one hold was given up, not one for each try")

	proxy.Lose(3)
	err := outer.Release(ctx)
	proxy.RequireLost(t)
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, []string{b.key("bob")}, lost.Keys, "only what was lost before the first try")
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAnAcquireOfUnknownOutcomeIsGivenBack(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))

	proxy.Lose(4) // go-redis tries four times in all
	_, _, err := b.TryEach(outer.Context(ctx), []string{b.key("ann"), b.key("bob")}, time.Minute)
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
	names := b.names(600) // in three calls
	outer := b.take(ctx, time.Minute, names...)
	inner := b.take(outer.Context(ctx), time.Minute, names[300])

	proxy.Lose(4)
	err := inner.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)

	// The outer lease goes before the inner one is settled, and the first of its three calls is lost too.
	proxy.Lose(4)
	err = outer.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(names[599]), "the calls that got through have released")

	require.NoError(t, inner.Release(ctx))
	require.NoError(t, outer.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}
