package rebuild_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// gate stops a rebuilder before each call to Redis or to its session of Postgres until the test lets it pass.
type gate struct {
	arrived, pass chan struct{}
}

func newGate() gate { return gate{make(chan struct{}), make(chan struct{})} }

func (g gate) wait() {
	g.arrived <- struct{}{}
	<-g.pass
}

// DialHook implements redis.Hook.
func (g gate) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

// ProcessHook implements redis.Hook.
func (g gate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		g.wait()
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements redis.Hook.
func (g gate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		g.wait()
		return next(ctx, cmds)
	}
}

// TraceQueryStart implements pgx.QueryTracer. It never stops inside a transaction, for whose locks others would wait.
func (g gate) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if conn.PgConn().TxStatus() == 'I' {
		g.wait()
	}
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (g gate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// rival is a rebuilder without the lock that runs one call at a time.
type rival struct {
	gate
	*rebuild.Rebuilder
	shop *testshop.Shop
	done chan error // the result of the current rebuild
	busy bool
}

func newRival(s *testshop.Shop, t *testing.T) *rival {
	t.Helper()
	r := &rival{gate: newGate(), done: make(chan error, 1)}
	options := *s.Rdb.(*redis.Client).Options()
	rdb := redis.NewClient(&options)
	rdb.AddHook(r.gate)
	t.Cleanup(func() { _ = rdb.Close() })
	store := reservation.NewStore(rdb, s.Keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	r.shop = &testshop.Shop{Pool: s.Pool, Rdb: rdb, Keys: s.Keys, Store: store}
	r.Rebuilder = testwork.Rebuilder(r.shop, t)
	return r
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

// await waits until the rebuilder is stopped before its next call, or is done.
func (r *rival) await(t *testing.T) {
	t.Helper()
	select {
	case <-r.arrived:
	case err := <-r.done:
		r.busy = false
		t.Log("a rebuild has ended", "error", err)
	case <-time.After(60 * time.Second):
		t.Fatal("a rebuilder hangs")
	}
}

func (r *rival) step(t *testing.T) {
	t.Helper()
	r.pass <- struct{}{}
	r.await(t)
}

// claimPartition records the server of partition 0 in Postgres, as its first user does.
func claimPartition(s *testshop.Shop, t *testing.T) reservation.ServerState {
	t.Helper()
	server, err := s.Store.Inspect(t.Context(), 0)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), sql.CatalogClaimPartition, 0, server.RunID, server.ReplicationID)
	require.NoError(t, err)
	return server
}

// The first user of a partition records its server in Postgres and then in Redis. A check between the
// two closed the sale for a rebuild of nothing.
func TestFirstUseOfPartitionNeedsNoRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	server := claimPartition(s, t)
	r := newRival(s, t)
	var needs []rebuild.Need
	go func() {
		var err error
		needs, err = r.Needs(context.Background(), 1, true)
		r.done <- err
	}()
	r.busy = true
	r.await(t)
	for range 4 { // it looks more than once
		r.step(t)
		require.True(t, r.busy, "the check did not wait: %v", needs)
	}
	require.NoError(t, s.Store.MarkVerified(t.Context(), 0, server, reservation.FirstUse))
	for r.busy {
		r.step(t)
	}
	require.Empty(t, needs)
}

// Its first user may crash between the two.
func TestClaimedPartitionWithoutServerNeedsRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	claimPartition(s, t)
	needs, err := testwork.Rebuilder(s, t).Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Reason: rebuild.ReasonServer}}, needs)
}

// Several rebuilders without the lock take turns call by call, while buyers buy and workers record.
// Redis loses nothing, so no accepted order is voided or rejected, and no sale stays closed.
func TestConcurrentRebuildersVoidNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	rivalsVoidNothing(t, s, 12, func() uuid.UUID { return s.Open(t, 10_000) }, func(uuid.UUID) { s.RequireSound(t) })
}

// The same with a sale over several shards, which several rebuilds of partitions and of the sale close and open.
func TestConcurrentRebuildersOfShardsVoidNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t).Shop
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
		rebuilders[i] = newRival(s, t)
	}
	seed := cmp.Or(rivalsSeed, rand.Uint64())
	opened := 0
	for round := range rounds {
		random := rand.New(rand.NewPCG(seed, uint64(round)))
		sale := open()
		layout := s.LayoutOf(t, sale)
		t.Logf("round %d of seed %d", round, seed)
		whole := round%3 == 2 // rebuild the partition, not only the sale
		accepted := map[uuid.UUID]bool{}
		before := s.EpochOf(t, sale)
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
				testwork.FulfilAll(s, t)
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
		worker := testwork.Rebuilder(s, t)
		testkit.Eventually(t, 30*time.Second, "a worker opens what the rebuilders left closed", func() bool {
			require.NoError(t, testwork.Heal(s, t, worker, s.Keys.Partitions))
			found, err := worker.Needs(t.Context(), s.Keys.Partitions, true)
			require.NoError(t, err)
			return len(found) == 0
		})
		testwork.FulfilAll(s, t)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"), "Redis lost nothing")
		require.EqualValues(t, len(accepted), s.Count(t, "SELECT count(*) FROM orders WHERE sale_id = $1", sale))
		_, err := s.Catalog.PublishPending(t.Context())
		require.NoError(t, err)
		requireSound(sale)
		opened += int(s.EpochOf(t, sale) - before)
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
			s := testshop.NewShop(t, testkit.Pool(t))
			sale := s.Open(t, 100)
			s.Buy(t, sale, "first")
			testwork.Fulfil(s, t)
			frozen := s.Process(t)
			frozen.Setenv(crashpoint.FreezeEnv, crashpoint.RebuildStaged)
			frozen.Setenv(testwork.RebuildEnv, sale.String())
			frozen.Start()
			frozen.WaitOutput(30*time.Second, "frozen at "+crashpoint.RebuildStaged)
			require.EqualValues(t, 1, s.Count(t, endRebuildSessions), "its session ends")

			r := testwork.Rebuilder(s, t)
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
			testwork.Fulfil(s, t)
			require.Zero(t, s.Count(t, "SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
			s.RequireSound(t)
			testwork.RequireNoNeeds(s, t, 1)
		})
	}
}

const endRebuildSessions = `SELECT count(pg_terminate_backend(pid)) FROM pg_locks
	WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
	  AND classid = 5077217500 >> 32 AND objid = 5077217500 & 4294967295`
