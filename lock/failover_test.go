//go:build system

package lock_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
)

// failover is a replicated Redis whose master can be lost.
type failover struct {
	url    string
	master func(t *testing.T, key string) *localserver.Redis
	// copied reports whether a replica of the master has the key.
	copied func(t *testing.T, key string) bool
}

func (f failover) client(t *testing.T) redis.UniversalClient {
	t.Helper()
	client := testkit.Control(t, f.url)
	return client
}

func onSentinel(t *testing.T) failover {
	t.Helper()
	sentinels := testkit.OwnSentinels(t)
	return failover{
		url:    sentinels.URL,
		master: func(*testing.T, string) *localserver.Redis { return sentinels.Nodes[0] },
		copied: func(t *testing.T, key string) bool {
			t.Helper()
			replica := failover{url: sentinels.Nodes[1].URL}.client(t)
			return sentinels.InSync(t.Context(), sentinels.Nodes[1]) && replica.Exists(t.Context(), key).Val() == 1
		},
	}
}

func onCluster(t *testing.T) failover {
	t.Helper()
	cluster := testkit.OwnCluster(t)
	operator := testkit.Operate(t, cluster)
	of := func(key string) int { return operator.Master(operator.Slot(key)) }
	return failover{
		url:    cluster.URL,
		master: func(_ *testing.T, key string) *localserver.Redis { return cluster.Nodes[of(key)] },
		copied: func(t *testing.T, key string) bool {
			t.Helper()
			replica := operator.Client(operator.Replica(of(key)))
			found, err := replica.Pipelined(t.Context(), func(p redis.Pipeliner) error {
				p.ReadOnly(t.Context()) // on this connection
				p.Exists(t.Context(), key)
				return nil
			})
			return err == nil && found[1].(*redis.IntCmd).Val() == 1
		},
	}
}

// TestLockSurvivesFailover: a lock that the replica has is still held after the master is lost, its holder renews it,
// and a waiter gets it when it is released.
func TestLockSurvivesFailover(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) failover{"sentinel": onSentinel, "cluster": onCluster} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			f := start(t)
			const key = "{kept}:ann"
			holder := newLocker(t, f.client(t), lock.WithLease(20*time.Second))
			waiter := newLocker(t, f.client(t), lock.WithPoll(time.Second))
			held, err := holder.Acquire(ctx, key)
			require.NoError(t, err)
			testkit.Eventually(t, 30*time.Second, "the replica has the lock", func() bool { return f.copied(t, key) })
			got := make(chan *lock.Lease, 1)
			go func() {
				lease, err := waiter.Acquire(ctx, key)
				if err != nil {
					t.Error(err)
				}
				got <- lease
			}()
			f.master(t, key).Kill()
			rdb := f.client(t)
			before := time.Duration(0)
			testkit.Eventually(t, 30*time.Second, "the promoted server has the lock", func() bool {
				left, err := rdb.PTTL(ctx, key).Result()
				before = left
				return err == nil && left > 0
			})
			testkit.Eventually(t, 30*time.Second, "its holder renews it there", func() bool {
				left, err := rdb.PTTL(ctx, key).Result()
				renewed := err == nil && left > before
				before = left
				return renewed
			})
			require.NoError(t, held.Err())
			select {
			case <-got:
				t.Fatal("two owners hold the lock")
			default:
			}
			require.NoError(t, held.Release(ctx))
			lease := <-got
			require.NoError(t, lease.Release(ctx))
		})
	}
}

// TestMultiOutlivesFailoverOfOneServer: one of three independent servers is a master behind Sentinels.
func TestMultiOutlivesFailoverOfOneServer(t *testing.T) {
	ns := startNodes(t, 2)
	f := onSentinel(t)
	multi := func() *lock.Multi {
		m, err := lock.NewMulti([]*lock.Locker{
			newLocker(t, ns.clients[0]), newLocker(t, ns.clients[1]), newLocker(t, f.client(t)),
		})
		require.NoError(t, err)
		return m
	}
	ctx := t.Context()
	first, second := multi(), multi()
	held, err := ns.try(first, "ann")
	require.NoError(t, err)
	f.master(t, "ann").Kill()
	_, err = ns.try(second, "ann")
	require.ErrorIs(t, err, lock.ErrBusy, "the others are a majority")
	require.NoError(t, held.Err())
	require.NoError(t, held.Release(ctx))
	rdb := f.client(t)
	testkit.Eventually(t, 30*time.Second, "the third server is back", func() bool {
		lease, err := second.TryAcquire(ctx, "bob")
		if err != nil {
			return false
		}
		there := rdb.Exists(ctx, "bob").Val() == 1
		return lease.Release(ctx) == nil && there
	})
}
