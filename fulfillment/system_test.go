//go:build system

package fulfillment_test

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/pg"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

func TestConcurrentSweepersExpireAndReleaseOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const perSale = 700 // more than one batch
	sales := []uuid.UUID{s.OpenPayable(t, perSale), s.OpenPayable(t, perSale), s.OpenPayable(t, perSale)}
	var orders []uuid.UUID
	for _, sale := range sales {
		require.Equal(t, perSale, s.Crowd(t, sale, perSale))
		for _, out := range testwork.Fulfil(t, s) {
			orders = append(orders, out.Event.OrderID)
		}
	}
	testwork.EndWindow(t, s.Pool, orders...)
	together := func(turn func(context.Context) (int, error)) {
		done := make([]int, 4)
		var all errgroup.Group
		for i := range done {
			all.Go(func() (err error) {
				done[i], err = turn(t.Context())
				return err
			})
		}
		require.NoError(t, all.Wait())
		left, err := turn(t.Context()) // a sweeper may stop while another one processes the rest
		require.NoError(t, err)
		require.Zero(t, left)
		require.Equal(t, len(orders), done[0]+done[1]+done[2]+done[3])
	}
	together(func(ctx context.Context) (int, error) { return testwork.TryExpire(ctx, s) })
	require.EqualValues(t, len(orders), s.Count(t, testshop.ExpiredOrders))
	require.EqualValues(t, len(orders), s.Count(t, testshop.PendingReleases))
	require.Zero(t, s.Count(t, testshop.BrokenLogs))
	testwork.RequireUnbroken(t, s, uuid.Nil)
	together(func(ctx context.Context) (int, error) { return testwork.TryReleaseUnits(ctx, s) })
	require.Zero(t, s.Count(t, testshop.PendingReleases))
	for _, sale := range sales {
		require.EqualValues(t, perSale, s.Left(t, sale))
		require.Zero(t, testshop.Sold(t, s.Pool, sale))
		require.Zero(t, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	}
}

// onlyMissingGuard returns the only constraint or index that the database lacks, with the statements that restore it.
func onlyMissingGuard(t testing.TB, s *testshop.Shop) (sql.MissingGuard, []string) {
	t.Helper()
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	return missing[0], strings.Split(missing[0].Mend, "; ")
}

// After a loss of Redis while Postgres lacks a constraint or unique index, the rebuild succeeds
// immediately, or after the SQL in its error has restored the guard.
func TestRebuildSucceedsOrNamesMissingGuard(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	guards := testshop.Rows(t, s.Pool,
		`SELECT conname::text FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype IN ('p', 'u', 'c',
			'f') AND coninhcount = 0 AND conrelid::regclass::text NOT IN ('goose_db_version', 'sales')
		UNION ALL SELECT 'sales_not_oversold' UNION ALL SELECT 'orders_one_live_per_user' UNION ALL SELECT
		'sale_events_idempotency'`)
	require.Greater(t, len(guards), 15)
	refused := 0
	for _, guard := range guards {
		t.Log(guard)
		run(t, s, `DO $$ DECLARE t regclass := (SELECT conrelid::regclass FROM pg_constraint WHERE conname = '`+guard+
			`' AND coninhcount = 0); BEGIN
			IF t IS NULL THEN DROP INDEX IF EXISTS `+guard+`; ELSE EXECUTE format('ALTER TABLE %s DROP CONSTRAINT `+guard+
			`', t); END IF; END $$`)
		missing, mend := onlyMissingGuard(t, s)
		require.Equal(t, guard, missing.Name)

		report := testwork.Audit(t, s, uuid.Nil)
		require.Equal(t, "DB", testwork.Broken(report), testwork.Text(t, report))
		require.Contains(t, testwork.Text(t, report), missing.What+": restore it with "+missing.Mend)
		require.Equal(t, "guard", testwork.Unmended(testwork.Reconcile(t, s)))

		s.Flush(t)
		err := testwork.Heal(t, s, testwork.Rebuilder(t, s), 1)
		if slices.Contains(rebuild.NeededGuards, guard) {
			refused++
			require.ErrorIs(t, err, ledger.ErrGuardMissing)
			require.ErrorContains(t, err, missing.Mend)
			run(t, s, mend...)
			err = testwork.Heal(t, s, testwork.Rebuilder(t, s), 1)
		} else {
			run(t, s, mend...)
		}
		require.NoError(t, err)
		s.RequireSound(t)
		testwork.RequireNoNeeds(t, s, 1)
	}
	require.Equal(t, len(rebuild.NeededGuards), refused)
}

func TestHangingRedisDoesNotDelayExpiry(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	for range 6 {
		cancelledOrders(t, s, 1)
	}
	overdue := s.Buy(t, s.OpenPayable(t, 1), "ann")
	testwork.Fulfil(t, s)
	s.Server.Freeze()
	defer s.Server.Thaw()
	config, registry := testwork.Config(t, s), prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "the sweep of releases has waited for Redis", func() bool {
		return testshop.Metric(t, registry, "stampede_worker_failing", "release") == 1
	})
	testwork.EndWindow(t, s.Pool, overdue)
	testkit.Eventually(t, 20*time.Second, "the order expires",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 1 })
	require.EqualValues(t, 1, testshop.Metric(t, registry, "stampede_worker_failing", "release"),
		"Redis still hangs")
	s.Server.Thaw()
	testkit.Eventually(t, 30*time.Second, "all units are released",
		func() bool { return s.Count(t, testshop.PendingReleases) == 0 })
	stop()
}

// vanishedWithin is how long a vanished client may block the commits of a sale.
const vanishedWithin = 15 * time.Second

// waitingForItsClient counts sessions that hold locks and wait for the rest of a batch.
const waitingForItsClient = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND state = 'active' AND wait_event = 'ClientRead' AND backend_xid IS NOT NULL`

// TestCommitsContinueAfterWorkerFreezesInBatch freezes a process of whose last batch Postgres has received only a part:
// the sale's row is locked, and the COMMIT never arrives.
func TestCommitsContinueAfterWorkerFreezesInBatch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	victim := s.Process(t, "worker")
	databaseURL, cut := cutOffAfter(t, "SET sold = sold +")
	victim.Setenv("DATABASE_URL", databaseURL)
	victim.Start()
	s.Buy(t, sale, "ann")
	select {
	case <-cut:
	case <-time.After(30 * time.Second):
		t.Fatal("the worker does not send its batch")
	}
	victim.Freeze()
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest of the batch",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })

	s.Crowd(t, sale, 50)
	config := testwork.Config(t, s)
	config.Consumer, config.MinIdle = "survivor", time.Second
	log := &testshop.CountingLog{}
	config.Logger = slog.New(log)
	began := time.Now()
	testwork.Work(t, config)
	testkit.Eventually(t, vanishedWithin, "all orders of the sale are committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 51
	})
	t.Logf("committed %v after the worker had vanished", time.Since(began))
	require.EqualValues(t, 51, testshop.Sold(t, s.Pool, sale))
	testkit.Eventually(t, testshop.Soon, "the end of the session is logged, which does not delay the orders",
		func() bool { return log.Times(fulfillment.EndedSession) == 1 })
}

// TestCommitsContinueAfterIngressFreezesInChange does the same with a cancellation that has locked the sale's row.
func TestCommitsContinueAfterIngressFreezesInChange(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 100)
	s.Crowd(t, sale, 1)
	orderID := testwork.Fulfil(t, s)[0].Event.OrderID
	databaseURL, cut := cutOffAfter(t, "SET sold = sold -")
	pool, err := connect.Postgres(t.Context(), databaseURL, 1, connect.Service("serve"))
	require.NoError(t, err)
	ctx, vanish := context.WithCancel(t.Context())
	cancellation := make(chan error, 1)
	go func() {
		_, err := ledger.New(pool).Cancel(ctx, orderID, "user-0")
		cancellation <- err
		pool.Close()
	}()
	select {
	case <-cut:
	case err := <-cancellation:
		require.NoError(t, err)
		t.Fatal("the cancellation was not cut off")
	}
	testkit.Eventually(t, testshop.Soon, "its session waits for the rest",
		func() bool { return s.Count(t, waitingForItsClient) == 1 })
	s.Buy(t, sale, "ann")
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, vanishedWithin, "the other order of the sale is committed", func() bool {
		return s.Count(t, testshop.ConfirmedOrders) == 2
	})
	vanish()
	require.Error(t, <-cancellation)
	_, err = ledger.New(s.Pool).Cancel(t.Context(), orderID, "user-0")
	require.NoError(t, err, "the order is no longer locked")
}

// TestOnlySilentBlockerIsTerminated lets time pass by setting back when the sessions were seen.
func TestOnlySilentBlockerIsTerminated(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 1)
	log := &testshop.CountingLog{}
	blockers := fulfillment.NewBlockers(s.Pool, slog.New(log))
	endSilent := func() int {
		t.Helper()
		ended, err := blockers.EndSilent(t.Context())
		require.NoError(t, err)
		return ended
	}
	require.Zero(t, endSilent(), "no session waits")
	hold := s.HoldSale(t, sale)
	require.Zero(t, endSilent(), "no session waits for the lock")
	require.Zero(t, blockers.Seen())

	b := testwork.Batch(t, s, nil)
	answers := testwork.Handle(b, testwork.Messages(t, s)...)
	// Postgres sends the answer before it records that the session waits for its client.
	awaitSilent := func() {
		t.Helper()
		testkit.Eventually(t, testshop.Soon, "the batch waits for a silent session", func() bool {
			blocking, err := pg.Blockers(t.Context(), s.Pool)
			require.NoError(t, err)
			return len(blocking) == 1 && blocking[0].Silent
		})
	}
	awaitSilent()
	require.Zero(t, endSilent())
	blockers.Pass(fulfillment.SilentBetweenQueryMax / 2)
	require.Zero(t, endSilent(), "it was silent too shortly")
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "it is logged")
	require.Zero(t, endSilent())
	require.Equal(t, 1, log.Times(fulfillment.NamedSession), "it is logged once")

	_, err := hold.Exec(t.Context(), "SELECT 1")
	require.NoError(t, err)
	awaitSilent()
	blockers.Pass(fulfillment.SilentBetweenQueryMax)
	require.Zero(t, endSilent(), "a slow client is not ended")
	blockers.Pass(fulfillment.SilentBetweenQueryMax)
	awaitSilent()
	require.Equal(t, 1, endSilent())
	require.Equal(t, 1, log.Times(fulfillment.EndedSession))
	testwork.RequireDone(t, answers)
	_, err = hold.Exec(t.Context(), "SELECT 1")
	require.Error(t, err)
}

// redisBytes returns the memory of Redis without the buffers of its connections.
func redisBytes(t testing.TB, rdb redis.UniversalClient) int64 {
	t.Helper()
	info, err := rdb.Info(t.Context(), "memory").Result()
	require.NoError(t, err)
	_, rest, _ := strings.Cut(info, "\nused_memory:")
	text, _, _ := strings.Cut(rest, "\r")
	held, err := strconv.ParseInt(text, 10, 64)
	require.NoError(t, err)
	clients, err := rdb.ClientList(t.Context()).Result()
	require.NoError(t, err)
	for client := range strings.Lines(clients) {
		_, rest, _ := strings.Cut(client, " tot-mem=")
		text, _, _ := strings.Cut(rest, " ")
		lent, err := strconv.ParseInt(text, 10, 64)
		require.NoError(t, err)
		held -= lent
	}
	return held
}

// TestConfirmedOrderTakesAtMost150BytesOfRedis uses user ids of 36 characters, like UUIDs, and counts
// what is kept besides the order: the outcome messages in their largest form, and the rest of the stream.
func TestConfirmedOrderTakesAtMost150BytesOfRedis(t *testing.T) {
	t.Parallel()
	const orders, concurrent, bytesMax = 100_000, 512, 150
	s := testshop.NewShopOn(t, testshop.Options{
		RedisURL: testkit.OwnRedis(t).URL, Keys: reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1},
	})
	sale, key := s.Open(t, orders), s.Keys.Orders(0)
	s.Buy(t, sale, "first") // loads the scripts into Redis
	before := redisBytes(t, s.Rdb)

	var buyers errgroup.Group
	ids := make([]uuid.UUID, orders-1)
	for from := range concurrent {
		buyers.Go(func() error {
			for i := from; i < len(ids); i += concurrent {
				answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: uuid.NewString(), Quantity: 1})
				if err != nil {
					return err
				}
				ids[i] = answer.Reservation.OrderID
			}
			return nil
		})
	}
	require.NoError(t, buyers.Wait())
	require.EqualValues(t, orders, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())

	_, o, _ := testwork.PublishingLedger(t, s.Pool, s.Rdb, s.Keys)
	for rest := ids; len(rest) > 0; {
		outcomes := make([]order.OrderOutcome, min(ledger.OutcomesPerMessage, len(rest)))
		for i := range outcomes {
			outcomes[i] = order.OrderOutcome{OrderID: rest[i], Status: order.StatusConfirmed, Version: 2}
		}
		o.Publish(t.Context(), 0, outcomes)
		rest = rest[len(outcomes):]
	}
	require.NoError(t, s.Rdb.XGroupCreate(t.Context(), key, reservation.Group, "$").Err(), "all entries are processed")
	for {
		trimmed, err := stream.TrimOnce(t.Context(), s.Rdb, key)
		require.NoError(t, err)
		if trimmed == 0 {
			break
		}
	}
	// Redis grows the table of a hash, and frees the old one, in small steps.
	var each int64
	defer func() { t.Logf("%d bytes for each order", each) }()
	testkit.Eventually(t, 20*time.Second, "an order takes at most bytesMax", func() bool {
		each = (redisBytes(t, s.Rdb) - before) / int64(len(ids))
		return each <= bytesMax
	})
}
