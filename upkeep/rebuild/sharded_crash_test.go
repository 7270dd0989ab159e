//go:build system

package rebuild_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
)

// buyBetween lets a user of each shard buy between a crash and the next rebuild, and returns how many could. The others
// got an error to retry on.
func buyBetween(t *testing.T, s *testshop.Shop, sale uuid.UUID) (bought int) {
	t.Helper()
	layout := s.Layout(t, sale)
	asked := map[int]bool{}
	for i := 0; len(asked) < layout.Shards; i++ {
		user := fmt.Sprint("between-", i)
		if asked[layout.ShardOf(user)] {
			continue
		}
		asked[layout.ShardOf(user)] = true
		answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
		if err != nil {
			require.ErrorIs(t, err, reservation.ErrUnavailable)
			continue
		}
		require.Equal(t, reservation.Reserved, answer.Verdict)
		bought++
	}
	return bought
}

// The rebuild of a sale, with or without more shards, is killed at any step. It is found as unfinished and done again.
func TestRebuildOfShardsIsFinishedAfterCrash(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{4, 6} {
		for _, point := range []string{
			crashpoint.RebuildBegun, crashpoint.RebuildClosed, crashpoint.RebuildDrained, crashpoint.RebuildRaised,
			crashpoint.RebuildStaging, crashpoint.RebuildStaging + ":3", crashpoint.RebuildStaged, crashpoint.RebuildOpened,
			crashpoint.RebuildOpened + ":3", crashpoint.RebuildOpened + ":" + strconv.Itoa(shards),
			crashpoint.RebuildPublished,
		} {
			t.Run(fmt.Sprint(shards, "/", point), func(t *testing.T) {
				t.Parallel()
				s, sale := shardedSale(t)
				last := lastPlace(t, s, sale)
				victim := s.Process(t, "raise shards", sale.String(), strconv.Itoa(shards))
				victim.Setenv(crashpoint.Env, point)
				victim.Start()
				victim.WaitKilled(30 * time.Second)
				bought := buyBetween(t, s, sale)
				healAll(t, s)
				_, err := s.Catalog.PublishPending(t.Context())
				require.NoError(t, err)
				testwork.FulfilAll(t, s)
				require.EqualValues(t, 50+bought, s.Count(t, testshop.ConfirmedOrders))
				requireSells(t, s, sale, last)
				for p := range 8 {
					require.Empty(t, s.Rdb.Keys(t.Context(), s.Keys.Staged(p, sale, "*")).Val(), "no staged key is left")
				}
			})
		}
	}
}

// A worker is killed at any step of the rebuild of one lost partition and of the sale that has a shard in it.
func TestRebuildOfShardsIsFinishedAfterWorkerCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.RebuildBegun, crashpoint.RebuildDistrusted, crashpoint.RebuildClosed, crashpoint.RebuildDrained,
		crashpoint.RebuildServerSaved, crashpoint.RebuildVerified, crashpoint.RebuildBegun + ":2",
		crashpoint.RebuildClosed + ":2", crashpoint.RebuildDrained + ":2", crashpoint.RebuildRaised,
		crashpoint.RebuildStaged, crashpoint.RebuildOpened, crashpoint.RebuildOpened + ":3", crashpoint.RebuildPublished,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s, sale := shardedSale(t)
			layout := s.Layout(t, sale)
			testwork.FulfilAll(t, s)
			last := lastPlace(t, s, sale)
			require.NoError(t, s.Rdb.Del(t.Context(), dataOf(t, s, layout.Partition(2))...).Err())
			victim := s.Process(t, "worker")
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(30 * time.Second)
			bought := buyBetween(t, s, sale)
			successor := s.Process(t, "worker")
			successor.Start()
			r := testwork.Rebuilder(t, s)
			testkit.Eventually(t, 60*time.Second, "Redis agrees with Postgres, and all orders are recorded", func() bool {
				found, err := r.Needs(t.Context(), 8, true)
				return err == nil && len(found) == 0 && s.Count(t, testshop.ConfirmedOrders) == int64(50+bought)
			})
			testwork.AwaitRest(t, s)
			require.True(t, successor.Stop().Success())
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status NOT IN ('confirmed', 'cancelled')"))
			requireSells(t, s, sale, last)
		})
	}
}
