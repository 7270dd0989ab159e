//go:build system

package lock_test

import (
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestWaiterSurvivesARestartOfRedis(t *testing.T) {
	t.Run("that finds the lock held", func(t *testing.T) {
		server, b := ownServer(t)
		ctx, key := t.Context(), b.key("ann")
		held := b.take(ctx, lock.MaxLease, key)
		var o outageCounter
		waiting := acquiring(t, newLocker(t, b.rdb, lock.WithPoll(50*time.Millisecond), o.option()), key)
		b.waitListening(key, 1)
		server.Kill()
		o.wait(t, 3)
		require.NoError(t, server.Restart(ctx))
		require.Empty(t, waiting, "the lock came back with its data")
		require.NoError(t, held.Release(ctx))
		next := await(t, waiting, startsWithin, "the lock")
		assert.Greater(t, next.Token(key), held.Token(key))
		assert.Equal(t, 1, b.depth(key))
		require.NoError(t, next.Release(ctx))
		assert.Zero(t, b.depth(key))
	})
	t.Run("that begins before the call", func(t *testing.T) {
		server, b := ownServer(t)
		ctx, key := t.Context(), b.key("ann")
		server.Kill()
		var o outageCounter
		l := newLocker(t, b.rdb, o.option())
		const callers = 4
		var waiting []<-chan *lock.Lease
		for range callers {
			waiting = append(waiting, acquiring(t, l, key))
		}
		o.wait(t, callers+3)
		_, err := l.TryAcquire(ctx, key)
		require.ErrorIs(t, err, syscall.ECONNREFUSED, "TryAcquire does not wait for Redis")
		_, _, err = l.TryEach(ctx, []string{key})
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.NoError(t, server.Restart(ctx))
		for range callers {
			require.NoError(t, b.firstOf(waiting).Release(ctx))
		}
		assert.Zero(t, b.depth(key))
	})
	t.Run("while it reenters", func(t *testing.T) {
		server, b := ownServer(t)
		ctx, key := t.Context(), b.key("ann")
		var o outageCounter
		l := newLocker(t, b.rdb, o.option())
		held, err := l.Acquire(ctx, key, lock.For(time.Minute))
		require.NoError(t, err)
		server.Kill()
		deeper := make(chan *lock.Lease, 1)
		go func() {
			lease, err := l.Acquire(held.Context(ctx), key, lock.For(lock.MaxLease))
			assert.NoError(t, err)
			deeper <- lease
		}()
		o.wait(t, 2)
		require.NoError(t, server.Restart(ctx))
		lease := await(t, deeper, startsWithin, "the longer lease")
		assert.Greater(t, b.rdb.PTTL(ctx, key).Val(), time.Minute)
		require.NoError(t, lease.Release(ctx))
		require.NoError(t, held.Release(ctx))
	})
	t.Run("on several servers", func(t *testing.T) {
		t.Parallel()
		var nodes []*lock.Locker
		var benches []bench
		var restarts []func()
		for range 3 {
			server := testkit.OwnRedis(t)
			b := benchOn(t, server)
			benches = append(benches, b)
			nodes = append(nodes, b.Locker)
			server.Kill()
			restarts = append(restarts, func() { require.NoError(t, server.Restart(t.Context())) })
		}
		multi, err := lock.NewMulti(nodes)
		require.NoError(t, err)
		short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err = multi.Acquire(short, "ann")
		require.ErrorIs(t, err, lock.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)

		got := make(chan *lock.MultiLease, 1)
		go func() {
			lease, err := multi.Acquire(t.Context(), "ann")
			assert.NoError(t, err)
			got <- lease
		}()
		restarts[0]()
		restarts[1]()
		lease := await(t, got, startsWithin, "the lock of two of three")
		require.NoError(t, lease.Release(t.Context()))
		testkit.Eventually(t, startsWithin, "the release on both", func() bool {
			return benches[0].depth("ann")+benches[1].depth("ann") == 0
		})
	})
}

// A Redis that restarts with much data is loading and serves no calls meanwhile.
func TestWaiterWaitsWhileRedisLoadsItsData(t *testing.T) {
	t.Parallel()
	server, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{Settings: map[string]string{
		"appendonly": "no", "key-load-delay": "1000", "loading-process-events-interval-bytes": "1024",
	}})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	b := benchOn(t, server)
	ctx := t.Context()
	const fill = "for i = 1, 1000 do redis.call('SET', 'filler:' .. i, string.rep('x', 1000)) end return 1"
	require.NoError(t, b.rdb.Eval(ctx, fill, nil).Err())
	require.NoError(t, b.rdb.Save(ctx).Err())
	var loading atomic.Int64
	l := newLocker(t, b.rdb, lock.WithObserver(lock.Observer{Unreachable: func(_ int, err error) {
		if redis.IsLoadingError(err) {
			loading.Add(1)
		}
	}}))
	server.Kill()
	waiting := acquiring(t, l, b.key("ann"))
	require.NoError(t, server.Restart(ctx))
	require.NoError(t, await(t, waiting, startsWithin, "the lock").Release(ctx))
	assert.Positive(t, loading.Load(), "Redis was not seen loading: the test shows nothing")
}
