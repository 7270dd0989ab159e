//go:build system

package lock_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestClusterLocks(t *testing.T) {
	rdb := startCluster(t, 3)

	t.Run("a waiter is woken on every node", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		holder := newLocker(t, rdb)
		waiter := newLocker(t, rdb, lock.WithPoll(10*time.Minute))
		for _, key := range []string{"ann", "bob", "cid", "{0}:lock:ann", "{1}:lock:ann", "a{2}b{3}"} {
			lease, err := holder.Acquire(ctx, key, lock.For(10*time.Minute))
			require.NoError(t, err, key)
			got := make(chan error, 1)
			go func() {
				second, err := waiter.Acquire(ctx, key)
				if err == nil {
					err = second.Release(ctx)
				}
				got <- err
			}()
			testkit.Eventually(t, startsWithin, "a listener for "+key, func() bool {
				var listening atomic.Int64 // the nodes are asked in parallel
				require.NoError(t, rdb.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
					channels, err := node.PubSubShardChannels(ctx, "*"+key+"*").Result()
					listening.Add(int64(len(channels)))
					return err
				}))
				return listening.Load() == 1
			})
			require.NoError(t, lease.Release(ctx), key)
			require.NoError(t, <-got, key)
		}
	})

	t.Run("locks of many slots are renewed", func(t *testing.T) {
		ctx := t.Context()
		const locks = 60
		lease := 2 * time.Second
		l := newLocker(t, rdb, lock.WithLease(lease))
		var leases []*lock.Lease
		for i := range locks {
			got, err := l.Acquire(ctx, fmt.Sprintf("renewed-%d", i))
			require.NoError(t, err)
			leases = append(leases, got)
		}
		began := rdb.Time(ctx).Val()
		testkit.Eventually(t, 30*time.Second, "three leases", func() bool { return rdb.Time(ctx).Val().Sub(began) > 3*lease })
		for i, got := range leases {
			require.NoError(t, got.Err())
			require.EqualValues(t, 1, rdb.Exists(ctx, fmt.Sprintf("renewed-%d", i)).Val())
			require.NoError(t, got.Release(ctx))
		}
	})

	t.Run("keys with one hash tag share a call", func(t *testing.T) {
		ctx := t.Context()
		l := newLocker(t, rdb)
		lease, err := l.AcquireAll(ctx, []string{"{7}:ann", "{7}:bob"})
		require.NoError(t, err)
		each, busy, err := l.TryEach(ctx, []string{"{7}:bob", "{7}:cid"}, lock.For(time.Minute))
		require.NoError(t, err)
		assert.Equal(t, []string{"{7}:bob"}, busy)
		assert.Equal(t, []string{"{7}:cid"}, each.Keys())
		assert.Greater(t, each.Token("{7}:cid"), lease.Token("{7}:ann"))
		forced, err := l.ForceRelease(ctx, "{7}:cid")
		require.NoError(t, err)
		assert.True(t, forced)
		require.ErrorIs(t, each.Release(ctx), lock.ErrLost)
		require.NoError(t, lease.Release(ctx))

		_, err = l.AcquireAll(ctx, []string{"{7}:ann", "{8}:bob"})
		require.ErrorIs(t, err, lock.ErrInvalid)
		assert.ErrorContains(t, err, "share a hash tag")
	})
}
