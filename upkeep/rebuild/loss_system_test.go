//go:build system

package rebuild_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/rebuild"
)

// trap is a go-redis hook that calls spring before the left-th call.
type trap struct {
	left   atomic.Int64 // calls until it springs; 0 or less: never
	spring func()
}

func (h *trap) step() {
	if h.left.Add(-1) == 0 {
		h.spring()
	}
}

func (h *trap) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (h *trap) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.step()
		return next(ctx, cmd)
	}
}

func (h *trap) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.step()
		return next(ctx, cmds)
	}
}

// Redis is lost again before each call of a rebuild, one call per round.
func TestRebuildSurvivesLossOfRedisAtEachCall(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(t *testing.T, s *testshop.Shop){
		"emptied": func(t *testing.T, s *testshop.Shop) {
			_, port, err := net.SplitHostPort(s.Rdb.(*redis.Client).Options().Addr)
			require.NoError(t, err)
			other := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + port})
			defer func() { _ = other.Close() }()
			require.NoError(t, other.FlushAll(context.Background()).Err())
		},
		"restarted": func(t *testing.T, s *testshop.Shop) {
			s.Server.Kill()
			require.NoError(t, s.Server.Restart(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 1)
			hook := &trap{spring: func() { lose(t, s) }}
			sales := []uuid.UUID{s.Open(t, 100), s.Open(t, 100), s.Open(t, 100)}
			for _, sale := range sales {
				s.Crowd(t, sale, 30)
			}
			testwork.Fulfil(t, s)
			_, err := s.Catalog.End(t.Context(), sales[2])
			require.NoError(t, err)
			s.Rdb.AddHook(hook)
			r := testwork.Rebuilder(t, s)
			moments, again := 0, 0
			for moment := int64(1); ; moment++ {
				hook.left.Store(moment)
				report, err := r.Partition(t.Context(), 0, rebuild.ReasonByHand)
				sprung := hook.left.Load() <= 0
				hook.left.Store(0)
				again += report.Tries - 1
				// In any case holders get no second unit, and no sale is reported missing.
				for _, sale := range sales {
					answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "user-7", Quantity: 1})
					if err != nil {
						require.ErrorIs(t, err, reservation.ErrUnavailable)
					} else {
						require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
					}
				}
				if !sprung {
					require.NoError(t, err)
					break
				}
				moments++
				testkit.Eventually(t, 30*time.Second, "a worker finishes the rebuild", func() bool {
					healErr := testwork.Heal(t, s, r, 1)
					found, err := r.Needs(t.Context(), 1, true)
					return healErr == nil && err == nil && len(found) == 0
				})
				_, err = s.Catalog.PublishPending(t.Context())
				require.NoError(t, err)
				s.RequireSound(t)
			}
			require.Greater(t, moments, 12, "the number of calls")
			require.Positive(t, again, "some rebuilds were restarted")
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
		})
	}
}

// More orders than one call takes, some with several units.
func TestRebuildCopiesManyOrders(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 100_000)
	const orders = 5*rebuild.HoldersPerCall + 1
	fill(t, s, sale, orders)
	s.Flush(t)
	require.EqualValues(t, orders, testwork.Rebuild(t, s).Sales[0].Orders)
	require.EqualValues(t, orders, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	for _, n := range []int{1, rebuild.HoldersPerCall, orders} {
		answer := s.Attempt(t, sale, "user-"+strconv.Itoa(n), 1, "")
		require.Equal(t, reservation.AlreadyPurchased, answer.Verdict)
		require.EqualValues(t, n, answer.Reservation.Sequence)
		require.EqualValues(t, 1+n%3, answer.Reservation.Quantity)
	}
	require.Equal(t, reservation.Reserved, s.Ask(t, sale, fmt.Sprint("user-", orders+1)).Verdict)
	testwork.Fulfil(t, s)
	s.RequireSound(t)
}

func TestRebuildVoidsExactlyTheLostTailOfAOF(t *testing.T) {
	t.Parallel()
	for _, recorded := range []int{0, 80, 140} { // orders in Postgres before Redis is lost
		t.Run(fmt.Sprintf("%d in Postgres", recorded), func(t *testing.T) {
			t.Parallel()
			const kept, cut = 100, 100
			s := testshop.OnOwnRedis(t, 1)
			sale := s.Open(t, 1000)
			var receipts []order.Receipt
			buy := func() {
				user := fmt.Sprintf("user-%d", len(receipts))
				r := s.Ask(t, sale, user).Reservation
				receipts = append(receipts, order.Receipt{
					OrderID: r.OrderID, SaleID: sale, User: user, Epoch: r.Epoch, Sequence: r.Sequence, Quantity: 1,
					ReservedAt: r.ReservedAt,
				})
				if len(receipts) == recorded {
					testwork.Fulfil(t, s)
				}
			}
			for range kept {
				buy()
			}
			file := appendOnlyFile(t, s)
			size := fileSize(t, file)
			for range cut {
				buy()
			}
			s.Server.Kill()
			// Inside a command: Redis truncates the incomplete one.
			require.NoError(t, os.Truncate(file, size+(fileSize(t, file)-size)/2+1))
			require.NoError(t, s.Server.Restart(t.Context()))
			survived := map[uuid.UUID]bool{}
			for _, event := range s.Events(t, 0) {
				survived[event.OrderID] = true
			}
			require.Greater(t, len(survived), kept)
			require.Less(t, len(survived), kept+cut)

			registry, _ := testwork.Guarded(t, s)
			testkit.Eventually(t, 30*time.Second, "the partition is rebuilt",
				func() bool { return testwork.Rebuilds(t, registry) == 1 })
			s.AwaitConfirmed(t, max(len(survived), recorded))
			testwork.AwaitRest(t, s)
			l := ledger.New(s.Pool)
			for i, receipt := range receipts {
				o, err := l.FindByReceipt(t.Context(), receipt)
				require.NoError(t, err)
				want := order.StatusConfirmed
				if !survived[receipt.OrderID] && i >= recorded {
					want = order.StatusVoided
				}
				require.Equal(t, want, o.Status, "order %d", i+1)
			}
			require.EqualValues(t, max(len(survived), recorded), testshop.Sold(t, s.Pool, sale))
			// Users whose order was lost may buy, holders of an order may not.
			for i := range receipts {
				want := reservation.Reserved
				if i < max(len(survived), recorded) {
					want = reservation.AlreadyPurchased
				}
				require.Equal(t, want, s.Ask(t, sale, fmt.Sprintf("user-%d", i)).Verdict)
			}
			s.AwaitConfirmed(t, kept+cut)
			testwork.AwaitRest(t, s)
			s.RequireSound(t)
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}

// appendOnlyFile returns the file to which the Redis of the test appends.
func appendOnlyFile(t testing.TB, s *testshop.Shop) string {
	t.Helper()
	where, err := s.Rdb.ConfigGet(t.Context(), "*dir*").Result()
	require.NoError(t, err)
	found, err := filepath.Glob(filepath.Join(where["dir"], where["appenddirname"], "*.incr.aof"))
	require.NoError(t, err)
	require.Len(t, found, 1)
	return found[0]
}

func fileSize(t testing.TB, file string) int64 {
	t.Helper()
	info, err := os.Stat(file)
	require.NoError(t, err)
	return info.Size()
}

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
				testwork.HealAll(t, s)
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
