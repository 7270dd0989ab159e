package lock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/localserver"
	"stampede/internal/testkit"
	"stampede/lock"
)

func ownServer(t *testing.T) (*localserver.Redis, bench) {
	t.Helper()
	t.Parallel()
	server := testkit.OwnRedis(t)
	options, err := redis.ParseURL(server.URL)
	require.NoError(t, err)
	options.DialerRetries = 1 // a server that was killed is not waited for
	rdb := redis.NewClient(options)
	t.Cleanup(func() { _ = rdb.Close() })
	return server, bench{locker(t, rdb), t, rdb, func(name string) string { return "lock:" + name }}
}

func TestLocksAreTakenAndReleasedAtMaxMemory(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	before := b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.ConfigSet(ctx, "maxmemory", "1").Err())
	require.ErrorContains(t, b.rdb.HSet(ctx, "some", "thing", "more").Err(), "OOM")

	during := b.take(ctx, time.Minute, b.key("bob"))
	_, err := b.TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, lock.ErrBusy, "which leaves a receipt")
	deeper := b.take(before.Context(ctx), 2*time.Minute, b.key("ann"))
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), time.Minute, "it is renewed")
	forced, err := b.ForceRelease(ctx, b.key("bob"))
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, during.Release(ctx), lock.ErrLost)
	for _, lease := range []*lock.Lease{deeper, before} {
		require.NoError(t, lease.Release(ctx))
	}
	assert.Zero(t, b.depth(b.key("ann")))
	assert.Zero(t, b.depth(b.key("bob")))
}

func TestScriptsThatRedisForgotAreSentAgain(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.ScriptFlush(ctx).Err())
	require.NoError(t, lease.Release(ctx))
	require.NoError(t, b.rdb.ScriptFlush(ctx).Err())
	lease = b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, lease.Release(ctx))
}

func TestRedisAwayIsNoLoss(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"))
	server.Kill()

	_, _, err := b.TryEach(ctx, []string{b.key("bob")}, lock.For(time.Minute))
	require.Error(t, err)
	err = lease.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost, "nobody knows")

	require.NoError(t, server.Restart(ctx))
	require.NoError(t, lease.Release(ctx), "this Redis writes every command to disk")
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestARedisThatComesBackEmptyHasLostTheLocks(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.FlushAll(ctx).Err())
	assert.True(t, lease.Holds(b.key("ann")), "Holds asks the clock only")
	require.ErrorIs(t, lease.Release(ctx), lock.ErrLost)
}
