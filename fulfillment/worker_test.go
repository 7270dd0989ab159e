package fulfillment_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/localserver"
	"stampede/internal/testkit"
	"stampede/lock"
	"stampede/reservation"
	"stampede/sql"
)

// shop is everything that a sale needs, on real servers.
type shop struct {
	pool     *pgxpool.Pool
	rdb      *redis.Client
	blocking *redis.Client
	keys     reservation.Keys
	store    *reservation.Store
	catalog  *reservation.Catalog
}

func newShop(t testing.TB, pool *pgxpool.Pool) *shop {
	t.Helper()
	return newShopOn(t, pool, testkit.RedisURL(t), testkit.Keys(t))
}

func newShopOn(t testing.TB, pool *pgxpool.Pool, redisURL string, keys reservation.Keys) *shop {
	t.Helper()
	blocking, err := connect.Blocking(redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = blocking.Close() })
	control, err := connect.Control(redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = control.Close() })
	s := &shop{pool: pool, rdb: control, blocking: blocking, keys: keys}
	s.store = reservation.NewStore(s.rdb, s.keys, reservation.StoreOptions{Logger: testkit.Logger(t), WaitMax: time.Minute})
	t.Cleanup(s.store.Close)
	s.catalog = reservation.NewCatalog(pool, s.store)
	return s
}

func (s *shop) open(t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	sale, err := s.catalog.Create(t.Context(), reservation.Terms{Name: "test", Stock: stock, PerOrderLimit: 10})
	require.NoError(t, err)
	return sale.ID
}

// crowd lets n users buy one unit each, and returns how many were accepted.
func (s *shop) crowd(t testing.TB, sale uuid.UUID, n int) (accepted int) {
	t.Helper()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			answer, err := s.store.Reserve(context.Background(), reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d", i), Quantity: 1})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if answer.Verdict == reservation.Reserved {
				accepted++
			}
		})
	}
	wg.Wait()
	return accepted
}

func (s *shop) buy(t testing.TB, sale uuid.UUID, user string) uuid.UUID {
	t.Helper()
	answer, err := s.store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, answer.Verdict)
	return answer.Reservation.OrderID
}

func (s *shop) config(t testing.TB) fulfillment.WorkerConfig {
	return fulfillment.WorkerConfig{
		Pool: s.pool, Blocking: s.blocking, Control: s.rdb, Keys: s.keys, Store: s.store, Catalog: s.catalog,
		Consumer: "worker", SweepInterval: 50 * time.Millisecond, TrimInterval: 50 * time.Millisecond,
		Logger: testkit.Logger(t),
	}
}

// work runs a worker until stop is called or the test ends.
func work(t testing.TB, config fulfillment.WorkerConfig) (stop func()) {
	t.Helper()
	worker, err := fulfillment.NewWorker(config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("worker: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the worker does not stop")
		}
	})
	t.Cleanup(stop)
	return stop
}

// restart brings Postgres back. The test's own questions must not meet the connections of before.
func (s *shop) restart(t testing.TB, server *localserver.Postgres) {
	t.Helper()
	require.NoError(t, server.Restart(t.Context()))
	s.pool.Reset()
}

func (s *shop) count(t testing.TB, query string, args ...any) int64 {
	t.Helper()
	return queryInt(t, s.pool, query, args...)
}

const confirmedOrders = "SELECT count(*) FROM orders WHERE status = 'confirmed'"

func (s *shop) awaitConfirmed(t testing.TB, n int) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, fmt.Sprintf("%d orders are confirmed", n), func() bool {
		return s.count(t, confirmedOrders) == int64(n)
	})
}

func (s *shop) awaitRest(t testing.TB) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "nothing waits in the stream", func() bool {
		b, err := fulfillment.ReadBacklog(t.Context(), s.rdb, s.keys.Orders(0), reservation.Group)
		require.NoError(t, err)
		return b.LagKnown && b.Lag+b.Pending == 0
	})
}

func TestWorkerFulfillsEveryReservation(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 300)
	registry := prometheus.NewRegistry()
	config := s.config(t)
	config.Registerer = registry
	stop := work(t, config)
	require.Equal(t, 300, s.crowd(t, sale, 500))
	s.awaitConfirmed(t, 300)
	s.awaitRest(t)
	require.EqualValues(t, 300, soldOf(t, s.pool, sale))
	require.EqualValues(t, 600, s.count(t, "SELECT count(*) FROM order_events"))
	testkit.Eventually(t, 10*time.Second, "handled entries are trimmed, but for a node of Redis's tree", func() bool {
		return s.rdb.XLen(t.Context(), s.keys.Orders(0)).Val() <= 100
	})
	testkit.Eventually(t, 5*time.Second, "no user stays locked", func() bool {
		return len(s.rdb.Keys(t.Context(), s.keys.Prefix+":*:lock:*").Val()) == 0
	})
	require.EqualValues(t, 300, valueOf(t, registry, "stampede_locks_total", "acquired"))
	require.EqualValues(t, 300, valueOf(t, registry, "stampede_locks_total", "released"))
	require.Zero(t, valueOf(t, registry, "stampede_locks_total", "lost"))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP stampede_orders_total Orders by what came of them: confirmed, rejected, voided or expired; and deliveries that were duplicate (recorded before) or unusable.
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

// Each of the workers is stopped and replaced all the time; what one has taken and not finished, the next one finds.
func TestRollingWorkersLoseAndDuplicateNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 2000)
	done := make(chan struct{})
	var workers sync.WaitGroup
	for lane := range 2 {
		config := s.config(t)
		config.Consumer, config.BatchMax, config.MinIdle = fmt.Sprintf("worker-%d", lane), 20, 200*time.Millisecond
		workers.Go(func() {
			for {
				worker, err := fulfillment.NewWorker(config)
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond+rand.N(300*time.Millisecond))
				if err := worker.Run(ctx); err != nil {
					t.Error(err)
				}
				cancel()
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	accepted := s.crowd(t, sale, 2000)
	s.awaitConfirmed(t, accepted)
	s.awaitRest(t)
	close(done)
	workers.Wait()
	require.EqualValues(t, accepted, soldOf(t, s.pool, sale))
	require.EqualValues(t, 2*accepted, s.count(t, "SELECT count(*) FROM order_events"))
	require.Zero(t, s.count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerWaitsForPostgresWithoutDeadLetters(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	pool, err := connect.Postgres(t.Context(), server.URL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := newShop(t, pool)
	sale := s.open(t, 400)
	log := &countingLog{}
	registry := prometheus.NewRegistry()
	config := s.config(t)
	config.Logger, config.Registerer = slog.New(log), registry
	config.BatchMax, config.MaxDeliveries = 10, 1
	stop := work(t, config)
	s.crowd(t, sale, 100)
	s.awaitConfirmed(t, 100)

	server.StopImmediate()
	for i := range 300 {
		s.buy(t, sale, fmt.Sprintf("later-%d", i))
	}
	failing := func() float64 { return valueOf(t, registry, "stampede_worker_failing", "record") }
	testkit.Eventually(t, 10*time.Second, "the outage shows", func() bool { return failing() == 1 })
	// What is away does not fill this process: it stops reading when its hands are full.
	testkit.Eventually(t, 10*time.Second, "the worker's hands are full", func() bool {
		return s.rdb.XPending(t.Context(), s.keys.Orders(0), reservation.Group).Val().Count == 40
	})
	s.restart(t, server)
	s.awaitConfirmed(t, 400)
	s.awaitRest(t)
	require.Zero(t, s.count(t, "SELECT count(*) FROM dead_letters"))
	require.EqualValues(t, 400, soldOf(t, pool, sale))
	require.Zero(t, failing())
	require.Equal(t, 1, log.times("cannot record orders in Postgres, trying again"), "an outage is told once")
	require.Equal(t, 1, log.times("can record orders in Postgres again"))
	stop()
}

func TestWorkerStopsPromptlyWithoutPostgres(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	pool, err := connect.Postgres(t.Context(), server.URL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := newShop(t, pool)
	sale := s.open(t, 100)
	config := s.config(t)
	config.MaxDeliveries = 1 // a nack that counted would make a dead letter at once
	registry := prometheus.NewRegistry()
	config.Registerer = registry
	stop := work(t, config)
	s.buy(t, sale, "first")
	s.awaitConfirmed(t, 1)
	server.StopImmediate()
	s.crowd(t, sale, 50)
	testkit.Eventually(t, 10*time.Second, "the outage shows", func() bool {
		return valueOf(t, registry, "stampede_worker_failing", "record") == 1
	})
	started := time.Now()
	stop()
	require.Less(t, time.Since(started), 5*time.Second)
	b, err := fulfillment.ReadBacklog(t.Context(), s.rdb, s.keys.Orders(0), reservation.Group)
	require.NoError(t, err)
	require.EqualValues(t, 50, b.Lag+b.Pending)

	s.restart(t, server)
	config.Registerer = nil
	work(t, config)
	s.awaitConfirmed(t, 51)
	require.Zero(t, s.count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerStartsWithoutPostgres(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	pool, err := connect.Postgres(t.Context(), server.URL, 8)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s := newShop(t, pool)
	sale := s.open(t, 10)
	s.buy(t, sale, "alice")
	server.StopImmediate()
	log := &countingLog{}
	config := s.config(t)
	config.Logger = slog.New(log)
	work(t, config)
	testkit.Eventually(t, 10*time.Second, "it says what it waits for", func() bool {
		return log.times("cannot read the schema's version from Postgres, trying again") == 1
	})
	s.restart(t, server)
	s.awaitConfirmed(t, 1)
}

func TestWorkerRejectsWrongSchema(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	require.NoError(t, sql.Down(t.Context(), testkit.DatabaseURL(t)))
	worker, err := fulfillment.NewWorker(s.config(t))
	require.NoError(t, err)
	err = worker.Run(t.Context())
	require.ErrorIs(t, err, sql.ErrNotMigrated)
	require.ErrorContains(t, err, "stampede migrate up")
}

func TestWorkerRejectsSecondOrderAndReleasesUnit(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 10)
	work(t, s.config(t))
	first := s.buy(t, sale, "alice")
	s.awaitConfirmed(t, 1)
	// Redis forgets the buyer, as a rewound one would.
	require.NoError(t, s.rdb.HDel(t.Context(), s.keys.Buyers(0, sale), "alice").Err())
	second := s.buy(t, sale, "alice")
	s.awaitRest(t)
	order, err := fulfillment.NewLedger(s.pool).Order(t.Context(), second)
	require.NoError(t, err)
	require.Equal(t, reservation.StatusRejected, order.Status)
	require.Equal(t, reservation.RejectedAlreadyPurchased, order.Reason)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderRejected"}, history(t, s.pool, second))
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, history(t, s.pool, first))
	require.Equal(t, "9", s.rdb.HGet(t.Context(), s.keys.Sale(0, sale), "left").Val(), "one unit is sold")
	require.EqualValues(t, 1, soldOf(t, s.pool, sale))
}

func TestWorkerRejectsOrdersBeyondStockInSaleOrder(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 100)
	require.Equal(t, 100, s.crowd(t, sale, 100))
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET stock = 37 WHERE id = $1", sale)
	require.NoError(t, err)
	work(t, s.config(t))
	s.awaitRest(t)
	require.EqualValues(t, 37, soldOf(t, s.pool, sale))
	require.EqualValues(t, 37, s.count(t, confirmedOrders+" AND sequence <= 37"), "first come, first served")
	require.EqualValues(t, 63, s.count(t, "SELECT count(*) FROM orders WHERE status = 'rejected' AND reason = 'sold-out' AND version = 2"))
	require.Equal(t, "63", s.rdb.HGet(t.Context(), s.keys.Sale(0, sale), "left").Val())
	require.EqualValues(t, 37, s.rdb.HLen(t.Context(), s.keys.Buyers(0, sale)).Val())
	require.Zero(t, s.count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerFinishesRejectionAfterCrash(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 10)
	order := s.buy(t, sale, "alice")
	entries := s.rdb.XRange(t.Context(), s.keys.Orders(0), "-", "+").Val()
	msg, err := fulfillment.DecodeEntry(entries[0].ID, entries[0].Values, 1)
	require.NoError(t, err)
	event, err := reservation.DecodeReserved(msg)
	require.NoError(t, err)
	// Committed, and killed before the unit went back.
	_, err = fulfillment.NewLedger(s.pool).Refuse(t.Context(), []reservation.OrderReserved{event}, reservation.RejectedSoldOut)
	require.NoError(t, err)

	work(t, s.config(t))
	s.awaitRest(t)
	require.Equal(t, "10", s.rdb.HGet(t.Context(), s.keys.Sale(0, sale), "left").Val())
	require.False(t, s.rdb.HExists(t.Context(), s.keys.Buyers(0, sale), "alice").Val())
	require.Len(t, history(t, s.pool, order), 2)
}

func TestWorkerDeadLettersUnusableEntries(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 100)
	config := s.config(t)
	config.MaxDeliveries = 2
	stream := s.keys.Orders(0)
	s.rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: []any{"foo", "bar"}})
	s.crowd(t, sale, 20)
	entries := s.rdb.XRange(t.Context(), stream, "-", "+").Val()
	// The same events, of a version that nobody knows and of a sale that nobody has.
	future := entries[1].Values
	future["payload"] = strings.Replace(future["payload"].(string), `"version":1`, `"version":9`, 1)
	s.rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: future})
	lost := entries[2].Values
	lost["payload"] = strings.Replace(lost["payload"].(string), sale.String(), uuid.NewString(), 1)
	s.rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: lost})

	work(t, config)
	s.awaitConfirmed(t, 20)
	s.awaitRest(t)
	letters, err := fulfillment.NewDeadLetters(s.pool, s.rdb, s.store).List(t.Context(), fulfillment.DeadLetterParked, 10)
	require.NoError(t, err)
	require.Len(t, letters, 3)
	var reasons string
	for _, l := range letters {
		reasons += l.Reason + "\n"
	}
	require.Contains(t, reasons, "numbers are out of range")
	require.Contains(t, reasons, "unknown sale")
}

func TestWorkerDefersLockedUsers(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 10)
	other, busy, err := lock.New(s.rdb).TryEach(t.Context(), []string{s.keys.Lock(0, "alice")}, lock.For(30*time.Second))
	require.NoError(t, err)
	require.Empty(t, busy)
	alices := s.buy(t, sale, "alice")
	s.buy(t, sale, "bob")
	config, registry := s.config(t), prometheus.NewRegistry()
	config.Registerer = registry
	work(t, config)
	s.awaitConfirmed(t, 1)
	_, err = fulfillment.NewLedger(s.pool).Order(t.Context(), alices)
	require.ErrorIs(t, err, reservation.ErrOrderNotFound)
	testkit.Eventually(t, 5*time.Second, "alice was put off", func() bool {
		return valueOf(t, registry, "stampede_locks_total", "busy") > 0
	})
	require.NoError(t, other.Release(t.Context()))
	s.awaitConfirmed(t, 2)
}

// valueOf returns the value of the gauge or counter with that label value, or without labels for "", and 0 if there is none.
func valueOf(t testing.TB, from prometheus.Gatherer, name, label string) float64 {
	t.Helper()
	families, err := from.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == name && label == "" && len(m.GetLabel()) == 0 {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
			for _, l := range m.GetLabel() {
				if family.GetName() == name && l.GetValue() == label {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return 0
}

// countingLog is a slog.Handler that counts messages.
type countingLog struct{ messages sync.Map }

func (l *countingLog) Enabled(context.Context, slog.Level) bool { return true }

func (l *countingLog) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l *countingLog) WithGroup(string) slog.Handler { return l }

func (l *countingLog) Handle(_ context.Context, r slog.Record) error {
	n, _ := l.messages.LoadOrStore(r.Message, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	return nil
}

func (l *countingLog) times(message string) int {
	if n, ok := l.messages.Load(message); ok {
		return int(n.(*atomic.Int64).Load())
	}
	return 0
}
