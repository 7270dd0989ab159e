package fulfillment_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// makeUnreachable returns the shop as a process sees it to which the server of a partition does not answer until restore is
// called.
func makeUnreachable(t *testing.T, s *testshop.Shop, partition int) (seen *testshop.Shop, restore func()) {
	t.Helper()
	unreachable := s.Keys.Server(partition)
	unreachable = unreachable[:strings.Index(unreachable, "}")+1]
	var isUnreachable atomic.Bool
	isUnreachable.Store(true)
	options := *s.Rdb.(*redis.Client).Options()
	rdb := redis.NewClient(&options)
	t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			if key, ok := arg.(string); ok && isUnreachable.Load() && strings.HasPrefix(key, unreachable) {
				cmd.SetErr(context.DeadlineExceeded)
				return context.DeadlineExceeded
			}
		}
		return next(ctx, cmd)
	}))
	return s.Next(t, rdb), func() { isUnreachable.Store(false) }
}

// The shard of most releases does not answer; it may be the shard of the home partition. The releases of the other
// shards do not wait for it, and its own are applied when it answers.
func TestDarkShardDelaysNoOtherRelease(t *testing.T) {
	t.Parallel()
	for shard := range 2 {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 8)
			sale := s.OpenSharded(t, 2000, 2)
			layout := s.Layout(t, sale)
			const unreachable, others = ledger.SweepMax + 10, 10
			buy := func(of, users int) {
				for i := 0; users > 0; i++ {
					if user := fmt.Sprint("user-", of, "-", i); layout.ShardOf(user) == of {
						s.Buy(t, sale, user)
						users--
					}
				}
			}
			buy(shard, unreachable)
			buy(1-shard, others)
			testwork.FulfilAll(t, s)
			release := func(shard int, age string) {
				_, err := s.Pool.Exec(t.Context(), `INSERT INTO releases (order_id, sale_id, user_id, quantity, again_at)
					SELECT id, sale_id, user_id, quantity, now() - $2::interval FROM orders WHERE user_id LIKE $1`,
					fmt.Sprint("user-", shard, "-%"), age)
				require.NoError(t, err)
			}
			release(shard, "1 hour") // they come first
			release(1-shard, "1 minute")

			seen, restore := makeUnreachable(t, s, layout.Partition(shard))
			released := 0
			testkit.Eventually(t, 20*time.Second, "the others are released", func() bool {
				n, err := testwork.TryReleaseUnits(t.Context(), seen)
				require.Error(t, err, "a partition does not answer")
				released += n
				return released == others
			})
			require.EqualValues(t, unreachable, s.Count(t, testshop.PendingReleases))
			require.Zero(t, s.Count(t, "SELECT count(*) FROM releases WHERE refusals > 0"), "Redis has refused none")
			restore()
			testkit.Eventually(t, 20*time.Second, "all are released", func() bool {
				_, err := testwork.TryReleaseUnits(t.Context(), seen)
				return err == nil && s.Count(t, testshop.PendingReleases) == 0
			})
			var left int64
			for shard := range layout.Shards {
				n, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Partition(shard), sale), "left").Int64()
				require.NoError(t, err)
				left += n
			}
			require.EqualValues(t, 2000, left)
		})
	}
}

// An ingress crashed between the two steps of a move. The worker completes it, also while another sale has a unreachable
// shard.
func TestWorkerCompletesMovesOfUnits(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale, other := s.OpenSharded(t, 100, 2), uuid.Nil
	layout := s.Layout(t, sale)
	unreachable := (layout.Home + 4) % 8
	for other == uuid.Nil || s.Layout(t, other).Partition(1) != unreachable {
		other = s.OpenSharded(t, 10, 2)
	}
	testwork.GiveUnits(t, s, sale, 0, 1)
	seen, _ := makeUnreachable(t, s, unreachable)
	config := testwork.Config(t, seen)
	config.GuardInterval = 20 * time.Millisecond
	testwork.Work(t, config)
	testkit.Eventually(t, 30*time.Second, "the other shard has got the units", func() bool {
		return s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Partition(1), sale), "left").Val() == "75"
	})
	require.Equal(t, "25", s.Rdb.HGet(t.Context(), s.Keys.Sale(layout.Home, sale), "left").Val())
}

// A worker rebuilds a sale with several shards after all of its partitions were lost.
func TestWorkerRebuildsShardedSale(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sale := s.OpenSharded(t, 100, 4)
	require.Equal(t, 40, s.Crowd(t, sale, 40))
	testwork.FulfilAll(t, s)
	testwork.Guarded(t, s)
	s.Flush(t)
	testkit.Eventually(t, 60*time.Second, "all shards are open", func() bool {
		found, err := testwork.Rebuilder(t, s).Needs(t.Context(), 8, true)
		return err == nil && len(found) == 0
	})
	s.RequireShards(t, sale)
	for i := range 20 {
		s.Buy(t, sale, fmt.Sprint("new-", i))
	}
	s.AwaitConfirmed(t, 60)
	s.RequireShards(t, sale)
}
