//go:build system

package rebuild_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/upkeep/rebuild"
)

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
		worker := testwork.Rebuilder(t, s)
		testkit.Eventually(t, 30*time.Second, "a worker opens what the rebuilders left closed", func() bool {
			require.NoError(t, testwork.Heal(t, s, worker, s.Keys.Partitions))
			found, err := worker.Needs(t.Context(), s.Keys.Partitions, true)
			require.NoError(t, err)
			return len(found) == 0
		})
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
