package testwork

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// Confirm records orders of n users, user-1 first, and returns their ids.
func Confirm(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID, n int) []uuid.UUID {
	t.Helper()
	events := testshop.ReservedCrowd(sale, n)
	outcomes, err := ledger.New(pool).Record(t.Context(), events)
	require.NoError(t, err)
	ids := make([]uuid.UUID, n)
	for i, out := range outcomes {
		require.Equal(t, order.StatusConfirmed, out.Status)
		ids[i] = out.Event.OrderID
	}
	return ids
}

// Record records orders.
func Record(t testing.TB, l *ledger.Ledger, events []order.OrderReserved) []ledger.Outcome {
	t.Helper()
	outcomes, err := l.Record(t.Context(), events)
	require.NoError(t, err)
	return outcomes
}

// Pay records the payment of an order.
func Pay(t testing.TB, l *ledger.Ledger, id uuid.UUID, user, reference string) {
	t.Helper()
	_, err := l.Pay(t.Context(), id, user, reference)
	require.NoError(t, err)
}

// Cancel cancels an order of a user.
func Cancel(t testing.TB, l *ledger.Ledger, id uuid.UUID, user string) {
	t.Helper()
	_, err := l.Cancel(t.Context(), id, user)
	require.NoError(t, err)
}

// Heartbeat records that an ingress runs.
func Heartbeat(t testing.TB, pool *pgxpool.Pool) (outage time.Duration) {
	t.Helper()
	outage, err := ledger.Heartbeat{Pool: pool, Logger: testkit.Logger(t)}.Send(t.Context())
	require.NoError(t, err)
	return outage
}

// WaitLonger makes payments wait for so much longer.
func WaitLonger(t testing.TB, pool *pgxpool.Pool, d time.Duration, references ...string) {
	t.Helper()
	for _, statement := range []string{
		"UPDATE payment_events SET occurred_at = occurred_at - make_interval(secs => $1) WHERE reference = ANY ($2)",
		"UPDATE open_payments SET since = since - make_interval(secs => $1) WHERE reference = ANY ($2)",
	} {
		testshop.Exec(t, pool, statement, d.Seconds(), references)
	}
}

// EndWindow moves the payment deadlines of these orders into the past, by more than the outage that a busy machine may
// cause meanwhile.
func EndWindow(t testing.TB, pool *pgxpool.Pool, orders ...uuid.UUID) {
	t.Helper()
	Heartbeat(t, pool) // may record an outage
	require.NoError(t, MoveDue(t.Context(), pool, "pay_clock() - interval '1 min'", orders...))
	Heartbeat(t, pool)
}

// MoveDue sets the payment deadlines of these orders to an expression of SQL, in their rows and in their log.
func MoveDue(ctx context.Context, pool *pgxpool.Pool, due string, orders ...uuid.UUID) error {
	tag, err := pool.Exec(ctx, `
		WITH moved AS (UPDATE orders SET due = `+due+` WHERE id = ANY ($1) RETURNING sale_id, id, due)
		UPDATE order_events AS e SET due = moved.due FROM moved
		WHERE e.sale_id = moved.sale_id AND order_id = id AND version = 2`, orders)
	if err == nil && tag.RowsAffected() != int64(len(orders)) {
		err = fmt.Errorf("%d of %d deadlines were moved", tag.RowsAffected(), len(orders))
	}
	return err
}

func Order(t testing.TB, pool *pgxpool.Pool, id uuid.UUID) order.Order {
	t.Helper()
	o, err := ledger.New(pool).Order(t.Context(), id)
	require.NoError(t, err)
	return o
}

// Fulfil records the unread events of the stream, without a worker.
func Fulfil(t testing.TB, s *testshop.Shop) []ledger.Outcome {
	t.Helper()
	return fulfilPartition(t, s, 0)
}

// FulfilAll is Fulfil for the partitions that have unread events.
func FulfilAll(t testing.TB, s *testshop.Shop) {
	t.Helper()
	for p := range s.Keys.Partitions {
		if s.Rdb.Exists(t.Context(), s.Keys.Orders(p)).Val() == 0 {
			continue
		}
		waiting, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
		require.NoError(t, err)
		if n, known := waiting.Waiting(); !known || n > 0 {
			fulfilPartition(t, s, p)
		}
	}
}

func fulfilPartition(t testing.TB, s *testshop.Shop, partition int) []ledger.Outcome {
	t.Helper()
	ctx, key := t.Context(), s.Keys.Orders(partition)
	require.NoError(t, stream.CreateGroup(ctx, s.Rdb, key, reservation.Group))
	read, err := s.Rdb.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: reservation.Group, Consumer: "test",
		Streams: []string{key, ">"}, Count: 10_000, Block: -1,
	}).Result()
	require.NoError(t, err)
	var ids []string
	for _, entry := range read[0].Messages {
		ids = append(ids, entry.ID)
	}
	outcomes, err := ledger.New(s.Pool).Record(ctx, testshop.Decode(t, read[0].Messages))
	require.NoError(t, err)
	require.NoError(t, s.Rdb.XAck(ctx, key, reservation.Group, ids...).Err())
	return outcomes
}

// TryExpire expires overdue orders, as a sweep of a worker does.
func TryExpire(ctx context.Context, s *testshop.Shop) (expired int, err error) {
	return ledger.SweepSales(ctx, ledger.NewExpirer(ledger.New(s.Pool), slog.Default()).ExpireSome)
}

// Expire is TryExpire without an error.
func Expire(t testing.TB, s *testshop.Shop) (expired int) {
	t.Helper()
	expired, err := TryExpire(t.Context(), s)
	require.NoError(t, err)
	return expired
}

// TryReleaseUnits releases the units of ended orders, as a sweep of a worker does.
func TryReleaseUnits(ctx context.Context, s *testshop.Shop) (released int, err error) {
	return ledger.New(s.Pool).SweepReleases(ctx, s.Store)
}

// ReleaseUnits is TryReleaseUnits without an error.
func ReleaseUnits(t testing.TB, s *testshop.Shop) (released int) {
	t.Helper()
	released, err := TryReleaseUnits(t.Context(), s)
	require.NoError(t, err)
	return released
}

// PublishingLedger returns a ledger and its outcomes, which are published after a call of run, until stop.
func PublishingLedger(
	t testing.TB, pool *pgxpool.Pool, rdb redis.UniversalClient, keys reservation.Keys,
) (l *ledger.Ledger, o *ledger.Outcomes, run func() (stop func())) {
	t.Helper()
	o, err := ledger.NewOutcomes(ledger.OutcomesConfig{
		Client: rdb, Keys: keys, Logger: testkit.Logger(t),
		Registerer: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	return ledger.New(pool).WithOutcomes(o), o, func() func() {
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { o.Run(ctx) })
		stop := sync.OnceFunc(func() { cancel(); running.Wait() })
		t.Cleanup(stop)
		return stop
	}
}

// NewSaleWithItems inserts a sale straight into Postgres, with an item of each of these stocks: "item-a", "item-b" and
// so on. It may be paid at 10 EUR for a unit of the first one, 20 of the second and so on.
func NewSaleWithItems(t testing.TB, pool *pgxpool.Pool, stocks ...int64) uuid.UUID {
	t.Helper()
	sale := testshop.NewPayableSale(t, pool, 0)
	testshop.Exec(t, pool, "UPDATE sales SET items = $2, currency = 'EUR' WHERE id = $1", sale, len(stocks))
	for i, stock := range stocks {
		testshop.Exec(t, pool, `INSERT INTO sale_items (sale_id, item, code, name, unit_price, stock)
			VALUES ($1, $2, 'item-' || lower($2), 'Item ' || $2, $3, $4)`, sale, order.ItemLetter(i), 1000*(i+1), stock)
		testshop.Exec(t, pool, "UPDATE sales SET stock = stock + $2 WHERE id = $1", sale, stock)
	}
	return sale
}

// Basket makes the event of an order with these lines.
func Basket(sale uuid.UUID, user string, sequence int64, lines order.Lines) order.OrderReserved {
	event := testshop.Reserved(sale, user, sequence)
	event.Lines, event.Quantity = lines, lines.Units()
	return event
}

// SoldItems are the units of live orders of each item of a sale, in their order, and of all: "3,0 3".
func SoldItems(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) string {
	t.Helper()
	return testshop.Rows(t, pool, `SELECT (SELECT string_agg(sold::text, ',' ORDER BY item < 'a', item)
		FROM sale_items WHERE sale_id = $1) || ' ' || sold FROM sales WHERE id = $1`, sale)[0]
}
