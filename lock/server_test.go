package lock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
	"stampede/lua"
)

// manyDials is the pool size for a server that is stopped and restarted: after as many failed dials
// as the pool has places, go-redis answers with the last error for up to a second.
const manyDials = 10_000

// ownServer returns a bench with its own Redis, to be killed, frozen and restarted.
func ownServer(t *testing.T) (*localserver.Redis, bench) {
	t.Helper()
	t.Parallel()
	server := testkit.OwnRedis(t)
	return server, benchOn(t, server)
}

// forgetfulServer is ownServer with a Redis that writes nothing to disk.
func forgetfulServer(t *testing.T) (*localserver.Redis, bench) {
	t.Helper()
	t.Parallel()
	server, err := localserver.StartRedis(t.Context(),
		localserver.RedisOptions{Settings: map[string]string{"appendonly": "no"}})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	return server, benchOn(t, server)
}

func benchOn(t *testing.T, server *localserver.Redis) bench {
	t.Helper()
	options, err := redis.ParseURL(server.URL)
	require.NoError(t, err)
	options.DialerRetries = 1 // no retries against a killed server
	options.PoolSize = manyDials
	rdb := redis.NewClient(options)
	t.Cleanup(func() { _ = rdb.Close() })
	return bench{newLocker(t, rdb), t, rdb, func(name string) string { return "lock:" + name }}
}

func TestLocksWorkAtMaxMemory(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	before := b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.ConfigSet(ctx, "maxmemory", "1").Err())
	require.ErrorContains(t, b.rdb.HSet(ctx, "some", "thing", "more").Err(), "OOM")

	during := b.take(ctx, time.Minute, b.key("bob"))
	_, err := b.TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, lock.ErrBusy, "a busy answer leaves a receipt")
	deeper := b.take(before.Context(ctx), 2*time.Minute, b.key("ann"))
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), time.Minute, "a renewal")
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

// Redis forgets the scripts before each kind of call.
func TestCallsSucceedAfterScriptFlush(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	forget := func() {
		t.Helper()
		var known *redis.BoolSliceCmd
		_, err := b.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error { // the waiter may ask between two commands
			tx.ScriptFlush(ctx)
			known = tx.ScriptExists(ctx, lua.LockAcquire.Hash(), lua.LockRelease.Hash(), lua.LockRenew.Hash())
			return nil
		})
		require.NoError(t, err)
		require.NotContains(t, known.Val(), true)
	}
	keeper := newLocker(t, b.rdb, lock.WithLease(4*time.Second))
	waiter := newLocker(t, b.rdb, lock.WithPoll(never))

	forget()
	lease, err := keeper.Acquire(ctx, key)
	require.NoError(t, err)
	forget()
	waiting := acquiring(t, waiter, key)
	b.waitListening(key, 1)
	forget()
	b.waitRenewed(key, b.expiry(key))
	require.NoError(t, lease.Err())
	forget()
	require.NoError(t, lease.Release(ctx))
	next := await(t, waiting, startsWithin, "the lock")
	forget()
	require.NoError(t, next.Release(ctx))
	forget()
	forced, err := keeper.ForceRelease(ctx, key)
	require.NoError(t, err)
	assert.False(t, forced)
}
