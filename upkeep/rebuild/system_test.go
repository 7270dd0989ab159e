//go:build system

package rebuild_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// The note of a process that was killed stays, and its heart does not beat.
func TestNoteOfKilledRebuildIsSilent(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	hold := s.HoldSale(t, sale)
	process := s.Process(t, "rebuild", sale.String())
	process.Start()
	testkit.Eventually(t, 60*time.Second, "the rebuild is noted", func() bool {
		return s.Count(t, countNotes+" WHERE sale_id IS NOT NULL") == 1
	})
	process.Kill()
	require.NoError(t, hold.Rollback(t.Context()))
	testkit.Eventually(t, 60*time.Second, "its heart does not beat", func() bool {
		return s.Count(t, countNotes+" WHERE beat_at < now() - interval '3 s'") == 1
	})
}

// Redis fails while the stock is lowered. When it is back it is rebuilt from the stock in Postgres.
func TestLoweringWithdrawnByRebuildCanBeRetried(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	s.Server.Kill()
	_, err := s.Catalog.Restock(t.Context(), sale, -4, "returned")
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	require.NotErrorIs(t, err, catalog.ErrNotInForce, "it may not take effect")

	require.NoError(t, s.Server.Restart(t.Context()))
	r := testwork.Rebuilder(t, s)
	testkit.Eventually(t, 20*time.Second, "the stock is rebuilt",
		func() bool { return testwork.Heal(t, s, r, 1) == nil })
	_, err = s.Catalog.PublishPending(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"10", "9"}, pick(s.SaleInRedis(t, sale), "stock", "left"), "the stock is unchanged")

	for range 2 {
		lowered, err := s.Catalog.Restock(t.Context(), sale, -4, "returned")
		require.NoError(t, err)
		require.Equal(t, []int64{6, 5}, []int64{lowered.Stock, lowered.Available})
	}
	_, err = s.Catalog.Restock(t.Context(), sale, -3, "returned")
	require.ErrorIs(t, err, catalog.ErrIdempotencyKeyReused)
	s.RequireSound(t)
}

// A client that can write to Redis can repeatedly make Postgres refuse orders that Redis holds. The first rebuild is
// immediate, later ones are delayed more and more.
func TestRebuildsForRejectedOrdersAreBounded(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Buy(t, sale, "ann")
	registry, log := testwork.Guarded(t, s)
	s.AwaitConfirmed(t, 1)
	testwork.AwaitRest(t, s)
	refused := 0
	provoke := func() {
		t.Helper()
		// The reservation of ann is deleted, so she can buy again.
		require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Buyers(0, sale), "ann").Err())
		newIngress(t, s).Buy(t, sale, "ann")
		refused++
		testkit.Eventually(t, 20*time.Second, "Postgres refuses it", func() bool {
			return s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected'") == int64(refused)
		})
	}
	provoke()
	awaitRebuilt(t, s, registry, sale, 2)
	provoke()
	testkit.Eventually(t, 20*time.Second, "the rebuild is delayed",
		func() bool { return log.Times(rebuild.LogProofAgain) == 1 })
	require.EqualValues(t, 2, s.Epoch(t, sale))
	require.NoError(
		t, s.Exec(t, "UPDATE sale_events SET occurred_at = occurred_at - interval '2 minutes' WHERE type = 'SaleRebuilt'"),
	)
	awaitRebuilt(t, s, registry, sale, 3)
	require.Equal(t, 2.0, testwork.Rebuilds(t, registry))

	var wait float64
	for i, want := range []float64{0, 60, 120, 240, 480, 960, 1920, 3600, 3600} {
		other := s.Open(t, 1)
		require.NoError(t, s.Exec(t, `INSERT INTO sale_events (sale_id, revision, type, data, occurred_at)
			VALUES ($1, 99, 'SaleRebuilt', '{"reason": "refused"}', now() + interval '9 h')`, other))
		// The clock was set back since.
		for n := range i {
			_, err := s.Pool.Exec(context.Background(), `INSERT INTO sale_events (sale_id, revision, type, data)
				VALUES ($1, $2, 'SaleRebuilt', '{"reason": "refused"}')`, other, 100+n)
			require.NoError(t, err)
		}
		require.NoError(t, s.Pool.QueryRow(t.Context(), sql.RebuildWait, other, rebuild.ReasonsOfProofs).Scan(&wait))
		require.InDelta(t, want, wait, 30)
	}
}

// Buyers buy while the number of shards is raised. Each of them gets a unit once, or an error to retry on.
func TestRaiseOfShardsKeepsSelling(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	const (
		stock     = 100_000
		thinkTime = 5 * time.Millisecond // so that a slow rebuild does not meet ever more orders
	)
	sale := s.OpenSharded(t, stock, 2)
	r := testwork.Rebuilder(t, s)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var bought, refused atomic.Int64
	var buyers sync.WaitGroup
	for buyer := range 4 {
		buyers.Go(func() {
			for i := 0; ctx.Err() == nil; {
				answer, err := s.Store.Reserve(context.Background(), reservation.Request{
					Sale: sale, User: fmt.Sprint("user-", buyer, "-", i), Quantity: 1, IdempotencyKey: "k",
				})
				switch {
				case err != nil:
					refused.Add(1)
				case answer.Verdict == reservation.Reserved, answer.Verdict == reservation.Replayed:
					bought.Add(1)
					i++
					retry.Pause(thinkTime, ctx.Done())
				default:
					t.Errorf("the answer is %v", answer)
					return
				}
			}
		})
	}
	sells := func() {
		before := bought.Load()
		testkit.Eventually(t, 60*time.Second, "units are sold", func() bool { return bought.Load() >= before+50 })
	}
	sells()
	for shards := 2; shards <= 4; shards++ {
		last := lastPlace(t, s, sale)
		var report rebuild.Report
		testkit.Eventually(t, 60*time.Second, "the sale has more shards", func() bool {
			// A machine that stands still for seconds ends the session, and the sale stays closed until the next try.
			var err error
			report, err = r.RaiseShards(t.Context(), sale, shards, rebuild.ReasonByHand)
			return err == nil
		})
		require.Equal(t, shards, report.Sales[0].Shards)
		require.GreaterOrEqual(t, report.Sales[0].Sequence, last)
		sells()
	}
	stop()
	buyers.Wait()
	testwork.FulfilAll(t, s)
	require.Positive(t, refused.Load(), "buyers met the rebuilds")
	require.EqualValues(t, bought.Load(), s.Count(t, testshop.ConfirmedOrders))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
	s.RequireShards(t, sale)
	testwork.RequireNoNeeds(t, s, 8)
	require.EqualValues(t, 4, s.Count(t, `SELECT (data ->> 'shards')::int FROM sale_events
		WHERE sale_id = $1 AND type = 'SaleRebuilt' ORDER BY revision DESC LIMIT 1`, sale))
}

// begin starts a rebuild, which stops before its first call.
func (r *rival) begin(t *testing.T, run func(context.Context, *rebuild.Session) error) {
	t.Helper()
	config := r.shop.Pool.Config().ConnConfig.Copy()
	config.Tracer = r.gate
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	r.busy = true
	go func() {
		err := run(context.Background(), rebuild.NewSession(pg.Session{Conn: conn}))
		_ = conn.Close(context.Background())
		r.done <- err
	}()
	r.await(t)
}

// Several rebuilders without the lock take turns call by call, while buyers buy and workers record.
// Redis loses nothing, so no accepted order is voided or rejected, and no sale stays closed.
func TestConcurrentRebuildersVoidNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	rivalsVoidNothing(t, s, 12, func() uuid.UUID { return s.Open(t, 10_000) }, func(uuid.UUID) { s.RequireSound(t) })
}

// The same with a sale over several shards, which several rebuilds of partitions and of the sale close and open.
func TestConcurrentRebuildersOfShardsVoidNothing(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	rivalsVoidNothing(t, s, 6, func() uuid.UUID { return s.OpenSharded(t, 10_000, 3) },
		func(sale uuid.UUID) { s.RequireShards(t, sale) })
}

func rivalsVoidNothing(
	t *testing.T, s *testshop.Shop, rounds int, open func() uuid.UUID, requireSound func(uuid.UUID),
) {
	t.Helper()
	const rivals, moves = 3, 120
	rebuilders := make([]*rival, rivals)
	for i := range rebuilders {
		rebuilders[i] = newRival(t, s)
	}
	seed := cmp.Or(rivalsSeed, rand.Uint64())
	opened := 0
	for round := range rounds {
		random := rand.New(rand.NewPCG(seed, uint64(round)))
		sale := open()
		layout := s.Layout(t, sale)
		t.Logf("round %d of seed %d", round, seed)
		whole := round%3 == 2 // rebuild the partition, not only the sale
		accepted := map[uuid.UUID]bool{}
		before := s.Epoch(t, sale)
		buy := func() {
			answer, err := s.Store.Reserve(t.Context(),
				reservation.Request{Sale: sale, User: fmt.Sprint("user-", len(accepted)), Quantity: 1})
			if err != nil {
				require.ErrorIs(t, err, reservation.ErrUnavailable)
				return
			}
			require.Equal(t, reservation.Reserved, answer.Verdict)
			accepted[answer.Reservation.OrderID] = true
		}
		for range moves {
			switch r := rebuilders[random.IntN(rivals)]; {
			case random.IntN(4) == 0:
				buy()
			case random.IntN(8) == 0:
				testwork.FulfilAll(t, s)
			case r.busy:
				for range 1 + random.IntN(4)*random.IntN(4) {
					if r.busy {
						r.step(t)
					}
				}
			default:
				partition := layout.Partition(random.IntN(layout.Shards))
				r.begin(t, func(ctx context.Context, session *rebuild.Session) error {
					if whole {
						_, err := r.PartitionIn(ctx, session, partition, rebuild.ReasonByHand)
						return err
					}
					_, err := r.SaleIn(ctx, session, sale, rebuild.ReasonByHand)
					return err
				})
			}
		}
		for _, r := range rebuilders {
			for r.busy {
				r.step(t)
				buy()
			}
		}
		testwork.HealAll(t, s) // what the rebuilders left closed
		testwork.FulfilAll(t, s)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"), "Redis lost nothing")
		require.EqualValues(t, len(accepted), s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1", sale))
		_, err := s.Catalog.PublishPending(t.Context())
		require.NoError(t, err)
		requireSound(sale)
		opened += int(s.Epoch(t, sale) - before)
		_, err = s.Catalog.End(t.Context(), sale)
		require.NoError(t, err)
	}
	require.Greater(t, opened, rounds, "epochs were raised")
}

// rivalsSeed repeats a run; 0 draws a seed.
const rivalsSeed uint64 = 0

// A rebuilder freezes after it has staged the buyers, and its session of Postgres ends, as after 30 seconds of silence.
// Another rebuild begins, and the first rebuilder thaws when the second has closed or opened the sale.
func TestThawedRebuilderDoesNotOpenSaleClosedByAnother(t *testing.T) {
	t.Parallel()
	for name, advance := range map[string]func(t *testing.T, b *rebuild.Build, sales []rebuild.RequiredSale) (opened bool){
		"closed": func(t *testing.T, b *rebuild.Build, sales []rebuild.RequiredSale) bool {
			require.NoError(t, b.CloseAndDrain(t.Context(), sales))
			return false
		},
		"opened": func(t *testing.T, b *rebuild.Build, sales []rebuild.RequiredSale) bool {
			require.NoError(t, b.CloseAndDrain(t.Context(), sales))
			require.NoError(t, b.RebuildSales(t.Context(), sales))
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.Open(t, 100)
			s.Buy(t, sale, "first")
			testwork.Fulfil(t, s)
			frozen := s.Process(t, "rebuild", sale.String())
			frozen.Setenv(crashpoint.FreezeEnv, crashpoint.RebuildStaged)
			frozen.Start()
			frozen.WaitOutput(30*time.Second, "frozen at "+crashpoint.RebuildStaged)
			require.EqualValues(t, 1, s.Count(t, endRebuildSessions), "its session ends")

			r := testwork.Rebuilder(t, s)
			var session *rebuild.Session
			testkit.Eventually(t, 20*time.Second, "the lock is free", func() bool {
				var err error
				session, err = r.Begin(t.Context(), 0)
				return err == nil
			})
			defer session.End()
			guarded, err := r.FindSale(t.Context(), sale)
			require.NoError(t, err)
			b := r.NewBuild(session, rebuild.Need{Reason: rebuild.ReasonByHand})
			sales := []rebuild.RequiredSale{guarded}
			opened := advance(t, b, sales)
			if opened {
				s.Buy(t, sale, "second")
			}

			testkit.Eventually(t, 30*time.Second, "the frozen rebuilder finds that it was overtaken", func() bool {
				frozen.Thaw()
				select {
				case <-frozen.Done():
					return true
				default:
					return false
				}
			})
			answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "third", Quantity: 1})
			if !opened {
				require.ErrorIs(t, err, reservation.ErrUnavailable, "it stays closed: %v", answer)
				require.NoError(t, b.RebuildSales(t.Context(), sales))
				s.Buy(t, sale, "second")
			} else {
				require.NoError(t, err)
			}
			testwork.Fulfil(t, s)
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
			s.RequireSound(t)
			testwork.RequireNoNeeds(t, s, 1)
		})
	}
}

const endRebuildSessions = `SELECT count(pg_terminate_backend(pid)) FROM pg_locks
	WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
	  AND classid = 5077217500 >> 32 AND objid = 5077217500 & 4294967295`
