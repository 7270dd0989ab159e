//go:build system

package rebuild_test

import (
	"fmt"
	"slices"
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

// restartPoints are the points at which a rebuild needs the stream that survives a restart.
var restartPoints = []string{
	crashpoint.RebuildDistrusted, crashpoint.RebuildDrained, crashpoint.RebuildRaised, crashpoint.RebuildOpened,
	crashpoint.RebuildVerified,
}

// A worker that is killed at any step of a rebuild leaves no unfinished sale open, and the next one finishes it. At the
// second pass of a point one sale is rebuilt and another is not.
func TestRebuildIsFinishedAfterWorkerCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.RebuildBegun, crashpoint.RebuildDistrusted, crashpoint.RebuildClosed, crashpoint.RebuildDrained,
		crashpoint.RebuildRaised, crashpoint.RebuildRaised + ":2", crashpoint.RebuildStaging, crashpoint.RebuildStaged,
		crashpoint.RebuildOpened, crashpoint.RebuildPublished, crashpoint.RebuildPublished + ":2",
		crashpoint.RebuildServerSaved, crashpoint.RebuildVerified, crashpoint.RebuildRaised + ":3",
		crashpoint.RebuildOpened + ":3",
	} {
		for name, c := range map[string]struct {
			lose func(t *testing.T, s *testshop.Shop) error
			lost bool // Redis loses unread orders
		}{
			"emptied": {func(t *testing.T, s *testshop.Shop) error { return s.Rdb.FlushAll(t.Context()).Err() }, true},
			"restarted": {func(t *testing.T,
				s *testshop.Shop,
			) error {
				s.Server.Kill()
				return s.Server.Restart(t.Context())
			}, false},
		} {
			if !c.lost && !slices.Contains(restartPoints, point) {
				continue
			}
			t.Run(point+"/"+name, func(t *testing.T) {
				t.Parallel()
				const stock, written, unwritten = 40, 20, 10
				s := testshop.OnOwnRedis(t, 1)
				sales := []uuid.UUID{s.Open(t, stock), s.OpenPayable(t, stock), s.Open(t, stock)}
				for _, sale := range sales {
					require.Equal(t, written, s.Crowd(t, sale, written))
				}
				testwork.Fulfil(t, s)
				orders := map[uuid.UUID]bool{} // accepted and unread by workers
				for _, sale := range sales {
					for i := range unwritten {
						orders[s.Buy(t, sale, fmt.Sprintf("late-%d", i))] = true
					}
				}
				_, err := s.Catalog.End(t.Context(), sales[2])
				require.NoError(t, err)
				require.NoError(t, c.lose(t, s))

				victim := s.Process(t, "worker")
				victim.Setenv(crashpoint.Env, point)
				victim.Start()
				victim.WaitKilled(30 * time.Second)
				// A buyer gets a unit of the new epoch, or an error to retry on.
				bought := 0
				for _, sale := range sales {
					answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "between", Quantity: 1})
					if err != nil {
						require.ErrorIs(t, err, reservation.ErrUnavailable)
					} else if answer.Verdict == reservation.Reserved {
						bought++
						orders[answer.Reservation.OrderID] = true
						require.GreaterOrEqual(t, answer.Reservation.Epoch, int64(2))
					} else {
						require.Equal(t, reservation.Ended, answer.Verdict)
					}
				}

				successor := s.Process(t, "worker")
				successor.Start()
				r := testwork.Rebuilder(t, s)
				testkit.Eventually(t, 60*time.Second, "Redis agrees with Postgres, and all revisions are published", func() bool {
					found, err := r.Needs(t.Context(), 1, true)
					return err == nil && len(found) == 0 && s.Count(t,
						"SELECT count(*) FROM sales WHERE published_revision < revision") == 0
				})
				testwork.AwaitRest(t, s)
				testkit.Eventually(t, 30*time.Second, "every order is confirmed", func() bool {
					want := 3*written + bought
					if !c.lost {
						want += 3 * unwritten
					}
					return s.Count(t, testshop.ConfirmedOrders) == int64(want)
				})
				require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
				for _, sale := range sales {
					require.GreaterOrEqual(t, s.Epoch(t, sale), int64(2))
					for i := range written { // holders cannot buy again
						answer := s.Ask(t, sale, fmt.Sprintf("user-%d", i))
						require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
					}
				}
				s.RequireSound(t)
				testwork.RequireUnbroken(t, s, uuid.Nil)
				require.Empty(t, s.Rdb.Keys(t.Context(), s.Keys.Staged(0, sales[0], "*")).Val(), "no staged key is left")
				require.True(t, successor.Stop().Success())
			})
		}
	}
}

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
			require.NoError(t, s.Rdb.Del(t.Context(), dataIn(t, s, layout.Partition(2))...).Err())
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
				return err == nil && len(found) == 0 && s.Count(t, testshop.ConfirmedOrders) == int64(50+bought) &&
					s.Count(t, "SELECT count(*) FROM sales WHERE revision > published_revision") == 0
			})
			testwork.AwaitRest(t, s)
			require.True(t, successor.Stop().Success())
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status NOT IN ('confirmed', 'cancelled')"))
			requireSells(t, s, sale, last)
		})
	}
}
