package fulfillment_test

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/sql/migrate"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

func TestMain(m *testing.M) { testwork.Main(m) }

func TestWorkerFulfillsEveryReservation(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 300)
	registry := prometheus.NewRegistry()
	config := testwork.Config(t, s)
	config.Registerer = registry
	stop := testwork.Work(t, config)
	require.Equal(t, 300, s.Crowd(t, sale, 500))
	s.AwaitConfirmed(t, 300)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 300, testshop.Sold(t, s.Pool, sale))
	require.EqualValues(t, 300, s.Count(t, "SELECT count(*) FROM order_events"))
	testkit.Eventually(t, 30*time.Second, "handled entries are trimmed, except for one node of the stream", func() bool {
		return s.Rdb.XLen(t.Context(), s.Keys.Orders(0)).Val() <= 100
	})
	testkit.Eventually(t, 30*time.Second, "all locks of users are released", func() bool {
		return len(s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*:lock:*").Val()) == 0
	})
	require.EqualValues(t, 300, testshop.Metric(t, registry, "stampede_locks_total", "acquired"))
	testkit.Eventually(t, testshop.Soon, "all releases are counted, which follows the answer of Redis", func() bool {
		return testshop.Metric(t, registry, "stampede_locks_total", "released") == 300
	})
	require.Zero(t, testshop.Metric(t, registry, "stampede_locks_total", "lost"))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP stampede_orders_total Orders by outcome. Workers count confirmed, rejected, voided and expired ones, and `+
		`deliveries that were duplicate (recorded before) or unusable; ingresses count paid and cancelled ones.
# TYPE stampede_orders_total counter
stampede_orders_total{outcome="confirmed"} 300
stampede_orders_total{outcome="duplicate"} 0
stampede_orders_total{outcome="expired"} 0
stampede_orders_total{outcome="rejected"} 0
stampede_orders_total{outcome="unusable"} 0
stampede_orders_total{outcome="voided"} 0
`), "stampede_orders_total"))
	stop()
}

func TestWorkerRejectsWrongSchema(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	require.NoError(t, migrate.Down(t.Context(), testkit.DatabaseURL(t)))
	worker, err := fulfillment.NewWorker(testwork.Config(t, s))
	require.NoError(t, err)
	err = worker.Run(t.Context())
	require.ErrorIs(t, err, sql.ErrNotMigrated)
	require.ErrorContains(t, err, "stampede migrate up")
}

func TestWorkerRejectsSecondOrderAndReleasesUnit(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	testwork.Work(t, testwork.Config(t, s))
	first := s.Buy(t, sale, "alice")
	s.AwaitConfirmed(t, 1)
	// Redis loses the buyer, as after it was set back.
	require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Buyers(0, sale), "alice").Err())
	second := s.Buy(t, sale, "alice")
	testwork.AwaitRest(t, s)
	o, err := ledger.New(s.Pool).Order(t.Context(), second)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, o.Status)
	require.Equal(t, order.RejectedAlreadyPurchased, o.Reason)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderRejected"}, testshop.History(t, s.Pool, second))
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, testshop.History(t, s.Pool, first))
	// The worker rebuilds the stock, because of the buyer that Redis lacks: it is closed meanwhile.
	testkit.Eventually(t, testshop.Soon, "one unit is sold", func() bool { return s.Left(t, sale) == 9 })
	require.EqualValues(t, 1, testshop.Sold(t, s.Pool, sale))
}

func TestWorkerRejectsOrdersBeyondStockInSaleOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	require.Equal(t, 100, s.Crowd(t, sale, 100))
	require.NoError(t, s.Exec(t, "UPDATE sales SET stock = 37 WHERE id = $1", sale))
	// Messages may be handled in any order, so all orders are in one, the latest first.
	events := s.Events(t, 0)
	slices.SortFunc(events, func(x, y order.OrderReserved) int { return cmp.Compare(y.Sequence, x.Sequence) })
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	require.NoError(t, s.Rdb.XAdd(t.Context(),
		&redis.XAddArgs{Stream: s.Keys.Orders(0), Values: stream.Values(events...)}).Err())
	testwork.Work(t, testwork.Config(t, s))
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 37, testshop.Sold(t, s.Pool, sale))
	require.EqualValues(t, 37, s.Count(t, testshop.ConfirmedOrders+" AND sequence <= 37"),
		"the first orders are confirmed")
	require.EqualValues(t, 63,
		s.Count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND reason = 'sold-out' AND version = 2"))
	require.EqualValues(t, 63, s.Left(t, sale))
	require.EqualValues(t, 37, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerFinishesRejectionAfterCrash(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	o := s.Buy(t, sale, "alice")
	event := s.Events(t, 0)[0]
	// The worker crashed after the commit, before the unit was released.
	_, err := ledger.New(s.Pool).Refuse(t.Context(), []order.OrderReserved{event}, order.RejectedSoldOut)
	require.NoError(t, err)

	testwork.Work(t, testwork.Config(t, s))
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 10, s.Left(t, sale))
	require.False(t, s.Rdb.HExists(t.Context(), s.Keys.Buyers(0, sale), "alice").Val())
	require.Len(t, testshop.History(t, s.Pool, o), 2)
}

func TestWorkerDeadLettersUnusableEntries(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	config := testwork.Config(t, s)
	config.MaxDeliveries = 2
	key := s.Keys.Orders(0)
	s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []any{"foo", "bar"}})
	s.Crowd(t, sale, 20)
	entries := s.Rdb.XRange(t.Context(), key, "-", "+").Val()
	// The same orders, in an unknown version and of an unknown sale.
	for from, to := range map[string]string{
		"event_version\xa12": "event_version\xa19",
		sale.String():        uuid.NewString()[:32] + sale.String()[32:],
	} {
		values := maps.Clone(entries[1].Values)
		values["metadata"] = strings.Replace(values["metadata"].(string), from, to, 1)
		s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: values})
	}

	testwork.Work(t, config)
	s.AwaitConfirmed(t, 20)
	testwork.AwaitRest(t, s)
	letters, err := deadletter.NewStore(s.Pool, s.Rdb, s.Store).List(t.Context(), deadletter.StatusParked, 50)
	require.NoError(t, err)
	wholes, reasons := 0, ""
	for _, l := range letters {
		reasons += l.Reason + "\n"
		if l.OrderID == uuid.Nil {
			wholes++
		}
	}
	require.Equal(t, 2, wholes, reasons)
	require.Contains(t, reasons, `version "9"`)
	require.Contains(t, reasons, "unknown sale")
}

// An order that contradicts the ledger is stored alone; the rest of its entry is recorded.
func TestWorkerDeadLettersOnlyTheFaultyOrderOfAnEntry(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	events := testshop.ReservedCrowd(sale, 20)
	contradicted := events[7]
	contradicted.UserID = "another"
	testwork.Record(t, ledger.New(s.Pool), []order.OrderReserved{contradicted})
	config := testwork.Config(t, s)
	config.MaxDeliveries, config.BatchMax = 2, 6 // the entry takes several batches
	key := s.Keys.Orders(0)
	s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: stream.Values(events...)})
	testwork.Work(t, config)
	testwork.AwaitRest(t, s)

	// Redis lacks the order that Postgres has, so the sale may be rebuilt meanwhile, which voids some.
	require.EqualValues(t, 19, s.Count(t, "SELECT count(*) FROM orders WHERE user_id LIKE 'user-%'"))
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	letter := testwork.OnlyLetter(t, s, letters)
	require.Equal(t, events[7].OrderID, letter.OrderID)
	require.Contains(t, letter.Reason, "contradicts the ledger")
	held, err := deadletter.OrdersOf(letter.Entry)
	require.NoError(t, err)
	require.Equal(t, []order.OrderReserved{events[7]}, held)
}

func TestWorkerDefersLockedUsers(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	other, busy, err := lock.New(s.Rdb).TryEach(t.Context(), []string{s.Keys.Lock(0, "alice")}, lock.For(30*time.Second))
	require.NoError(t, err)
	require.Empty(t, busy)
	deferred := s.Buy(t, sale, "alice")
	s.Buy(t, sale, "bob")
	config, registry := testwork.Config(t, s), prometheus.NewRegistry()
	config.Registerer = registry
	testwork.Work(t, config)
	s.AwaitConfirmed(t, 1)
	_, err = ledger.New(s.Pool).Order(t.Context(), deferred)
	require.ErrorIs(t, err, order.ErrNotFound)
	testkit.Eventually(t, 30*time.Second, "the order of alice is deferred", func() bool {
		return testshop.Metric(t, registry, "stampede_locks_total", "busy") > 0
	})
	require.NoError(t, other.Release(t.Context()))
	s.AwaitConfirmed(t, 2)
}

// A full Redis gets room only from workers, so they must be able to start while it is full.
func TestWorkerDrainsFullRedis(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 5)
	for _, user := range []string{"ann", "bob", "cid", "dan", "eve"} {
		s.Buy(t, sale, user)
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET stock = 4 WHERE id = $1", sale))
	require.NoError(t, stream.CreateGroup(t.Context(), s.Rdb, s.Keys.Orders(0), reservation.Group))
	require.NoError(t, s.Rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	require.ErrorContains(t, s.Rdb.Set(t.Context(), "some", "thing", 0).Err(), "OOM")

	testwork.Work(t, testwork.Config(t, s))
	s.AwaitConfirmed(t, 4)
	testwork.AwaitRest(t, s)
	require.EqualValues(t, 1, s.Left(t, sale), "the rejected order's unit is released")
}

// An operator raises STAMPEDE_PARTITIONS and restarts the ingresses before the workers.
func TestWorkerDetectsAddedPartitions(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s := testshop.NewShopOn(t, testshop.Options{Pool: pool})
	log := &testshop.CountingLog{}
	registry := prometheus.NewRegistry()
	config := testwork.Config(t, s)
	config.Logger, config.Registerer = slog.New(log), registry
	stop := testwork.Work(t, config)
	before := s.Open(t, 10)
	s.Buy(t, before, "alice")
	s.AwaitConfirmed(t, 1)

	wide := s.Keys
	wide.Partitions = 4
	more := testshop.NewShopOn(t, testshop.Options{Pool: pool, Keys: wide})
	sale := more.Open(t, 250)
	for wide.Partition(sale) == 0 {
		sale = more.Open(t, 250)
	}
	partition := wide.Partition(sale)
	testshop.Exec(t, pool, "UPDATE sales SET stock = 249 WHERE id = $1", sale)
	for i := range 250 { // one after the other: an entry for each, so that there is something to trim
		more.Buy(t, sale, fmt.Sprint("user-", i))
	}
	s.Buy(t, before, "bob")
	s.AwaitConfirmed(t, 251)

	testkit.Eventually(t, 30*time.Second, "the rejected order's unit is released in the new partition", func() bool {
		return s.Rdb.HGet(t.Context(), wide.Sale(partition, sale), "left").Val() == "1"
	})
	require.Equal(t, 1, log.Times("sales have more partitions"))
	require.Equal(t, float64(1), testshop.Metric(t, registry, "stampede_stream_reachable", wide.Orders(partition)),
		"the backlog is measured")
	testkit.Eventually(t, 30*time.Second, "handled entries are trimmed", func() bool {
		return s.Rdb.XLen(t.Context(), wide.Orders(partition)).Val() <= 100 &&
			testshop.Metric(t, registry, "stampede_entries_trimmed_total", wide.Orders(partition)) > 0
	})
	stop()
	for p := range wide.Partitions {
		b, err := stream.ReadBacklog(t.Context(), s.Rdb, wide.Orders(p), reservation.Group)
		require.NoError(t, err)
		require.Zero(t, b.Pending, fmt.Sprint(p))
	}
}

// A worker creates the tables of the next month.
func TestWorkerMakesMonthsAhead(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const complete = "SELECT count(*) FROM order_months WHERE first > '01800000-0000-0000-0000-000000000000' AND " +
		"orders IS NOT NULL AND events IS NOT NULL"
	made := s.Count(t, complete)
	require.NoError(t, s.Exec(t, `DO $$
		DECLARE part text := (SELECT events FROM order_months ORDER BY first DESC LIMIT 1);
		BEGIN EXECUTE 'DROP TABLE ' || part; END $$`))
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	require.Contains(t, missing[0].What, "the table order_events has no part for the sales of")
	testwork.Work(t, testwork.Config(t, s))
	testkit.Eventually(t, testshop.Soon, "the month is complete", func() bool { return s.Count(t, complete) == made })
}

// A month whose orders are in a DEFAULT partition gets no table: the dashboard and the alerts say so.
func TestWorkerReportsMonthsInDefaultPartition(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	require.NoError(t, s.Exec(t, `DO $$
		DECLARE part text := (SELECT orders FROM order_months ORDER BY first DESC LIMIT 1);
		BEGIN EXECUTE 'DROP TABLE ' || part; END $$;
		CREATE TABLE orders_else PARTITION OF orders DEFAULT;
		INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		SELECT gen_random_uuid(), first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + interval '1 month'), 'ann', 1, 'voided',
			2, 1, 1, now(), now()`))
	registry := prometheus.NewRegistry()
	config := testwork.Config(t, s)
	config.Registerer = registry
	testwork.Work(t, config)
	failing := func() float64 { return testshop.Metric(t, registry, "stampede_worker_failing", "months") }
	testkit.Eventually(t, testshop.Soon, "the step months fails", func() bool { return failing() == 1 })
	require.NoError(t, s.Exec(t, "DELETE FROM orders_else"))
	testkit.Eventually(t, testshop.Soon, "the month has its table", func() bool { return failing() == 0 })
}

// The tables of a sale were removed manually: the next order creates them.
func TestOrderIsRecordedWithoutTables(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := ledger.New(s.Pool)
	sale := oldSale(t, s)
	require.NoError(t, s.Exec(t, "DROP TABLE orders_2026_03, order_events_2026_03"))
	outcomes := testwork.Record(t, l, testshop.ReservedCrowd(sale, 3))
	require.Equal(t, order.StatusConfirmed, outcomes[2].Status)

	unknown := testshop.Reserved(uuid.MustParse("01c30000-0000-7000-8000-000000001234"), "stranger", 1)
	outcomes, err := l.Refuse(t.Context(), []order.OrderReserved{unknown}, order.RejectedSoldOut)
	require.NoError(t, err, "of a sale that Postgres never had")
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
}

// oldSale makes an open sale of March 2026, which is in tables of its own.
func oldSale(t *testing.T, s *testshop.Shop) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	ms := time.Date(2026, time.March, 7, 0, 0, 0, 0, time.UTC).UnixMilli()
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i)))
	}
	require.NoError(t, s.Exec(t, "INSERT INTO sales (id, name, stock) VALUES ($1, 'old', 1000)", id))
	return id
}

func run(t testing.TB, s *testshop.Shop, statements ...string) {
	t.Helper()
	for _, statement := range statements {
		_, err := s.Pool.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
}

// A rebuild that could not finish closes no sale.
func TestRebuildWithMissingGuardClosesNoSale(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	run(t, s, "DROP INDEX orders_one_live_per_user")
	before := s.SaleInRedis(t, sale)
	for _, rebuildWith := range []func(*rebuild.Rebuilder) error{
		func(r *rebuild.Rebuilder) error {
			_, err := r.Partition(t.Context(), 0, rebuild.ReasonByHand)
			return err
		},
		func(r *rebuild.Rebuilder) error {
			_, err := r.Sale(t.Context(), sale, rebuild.ReasonByHand)
			return err
		},
	} {
		require.ErrorIs(t, rebuildWith(testwork.Rebuilder(t, s)), ledger.ErrGuardMissing)
		require.Equal(t, before, s.SaleInRedis(t, sale))
	}
	s.Buy(t, sale, "meanwhile")
}

// The error of an order that cannot be recorded names the missing guard. The order does not become a dead letter.
func TestOrderWaitsWhileGuardIsMissing(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 40)
	o := testshop.Reserved(sale, "ann", 1)
	testwork.Record(t, ledger.New(s.Pool), []order.OrderReserved{o})
	run(t, s, "ALTER TABLE order_events DROP CONSTRAINT order_events_pkey")
	_, err := ledger.New(s.Pool).Record(t.Context(), []order.OrderReserved{o})
	require.ErrorIs(t, err, ledger.ErrGuardMissing)
	require.Equal(t, ledger.Transient, ledger.FaultOf(err))
	require.False(t, errors.Is(err, ledger.ErrContradiction))
}

func TestWorkerReportsWaitingOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	registry, _ := testwork.Guarded(t, s)
	held := s.HoldSale(t, sale)
	require.Equal(t, 100, s.Crowd(t, sale, 100))
	waiting := func(orders float64) {
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%g orders wait", orders), func() bool {
			return testshop.Metric(t, registry, "stampede_stream_waiting_orders", s.Keys.Orders(0)) == orders
		})
	}
	waiting(100)
	require.Less(t, s.Rdb.XLen(t.Context(), s.Keys.Orders(0)).Val(), int64(100), "entries hold several orders")
	require.NoError(t, held.Rollback(t.Context()))
	waiting(0)
}

// A check that takes long is made less often, so that it takes a small part of a worker's time.
func TestLongChecksAreRare(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		5 * time.Millisecond:   200 * time.Millisecond, // GuardInterval is longer
		100 * time.Millisecond: 4 * time.Second,
		time.Minute:            5 * time.Second,
	} {
		require.Equal(t, want, fulfillment.PauseAfter(took))
	}
}
