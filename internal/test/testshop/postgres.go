package testshop

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	ConfirmedOrders = "SELECT count(*) FROM orders WHERE status = 'confirmed'"
	ExpiredOrders   = "SELECT count(*) FROM orders WHERE status = 'expired'"
	PendingReleases = "SELECT count(*) FROM releases"
	// BrokenLogs counts orders whose events are not one for each version, or end elsewhere than the order.
	BrokenLogs = `SELECT count(*) FROM orders AS o WHERE (SELECT array_agg(version ORDER BY version) FROM order_history
		WHERE order_id = o.id)
		IS DISTINCT FROM (SELECT array_agg(n) FROM generate_series(1, o.version) AS n)`
)

// NewSale inserts a sale straight into Postgres, for tests that need no Redis.
func NewSale(t testing.TB, pool *pgxpool.Pool, stock int64) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	Exec(t, pool, "INSERT INTO sales (id, name, stock) VALUES ($1, 'test', $2)", id, stock)
	return id
}

// NewPayableSale is NewSale with a payment window.
func NewPayableSale(t testing.TB, pool *pgxpool.Pool, stock int64) uuid.UUID {
	t.Helper()
	sale := NewSale(t, pool, stock)
	Exec(t, pool, "UPDATE sales SET payment_window_seconds = $2 WHERE id = $1", sale, int64(PaymentWindow/time.Second))
	return sale
}

func RaiseEpoch(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) {
	t.Helper()
	Exec(t, pool, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
}

// Reserved makes an event as the script would have appended it.
func Reserved(sale uuid.UUID, user string, sequence int64) order.OrderReserved {
	at := time.UnixMilli(1_790_000_000_000 + sequence).UTC()
	return order.OrderReserved{
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: user, Quantity: 1, Epoch: 1,
		ReservedAt: at, Sequence: sequence,
	}
}

// ReservedCrowd makes events of n different users.
func ReservedCrowd(sale uuid.UUID, n int) []order.OrderReserved {
	events := make([]order.OrderReserved, n)
	for i := range events {
		events[i] = Reserved(sale, fmt.Sprintf("user-%d", i+1), int64(i+1))
	}
	return events
}

func QueryInt(t testing.TB, pool *pgxpool.Pool, query string, args ...any) int64 {
	t.Helper()
	var n int64
	require.NoError(t, pool.QueryRow(t.Context(), query, args...).Scan(&n))
	return n
}

// Rows are all rows of a query, as text.
func Rows(t testing.TB, pool *pgxpool.Pool, query string, args ...any) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), query, args...)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

func Sold(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) int64 {
	t.Helper()
	return QueryInt(t, pool, "SELECT sold FROM sales WHERE id = $1", sale)
}

// History is the events of an order as "version type".
func History(t testing.TB, pool *pgxpool.Pool, id uuid.UUID) []string {
	t.Helper()
	return Rows(t, pool,
		"SELECT version || ' ' || type FROM order_history WHERE order_id = $1 ORDER BY version", id)
}

// Exec runs a statement.
func Exec(t testing.TB, pool *pgxpool.Pool, statement string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statement, args...)
	require.NoError(t, err)
}

// Exec runs a statement, and returns its error.
func (s *Shop) Exec(t testing.TB, query string, args ...any) error {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), query, args...)
	return err
}

func (s *Shop) Count(t testing.TB, query string, args ...any) int64 {
	t.Helper()
	return QueryInt(t, s.Pool, query, args...)
}

func (s *Shop) AwaitConfirmed(t testing.TB, n int) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, fmt.Sprintf("%d orders are confirmed", n), func() bool {
		return s.Count(t, ConfirmedOrders) == int64(n)
	})
}

// Epoch returns the epoch of a sale in Postgres.
func (s *Shop) Epoch(t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	return s.Count(t, "SELECT epoch FROM sales WHERE id = $1", sale)
}

// Layout returns the layout of a sale in Postgres.
func (s *Shop) Layout(t testing.TB, sale uuid.UUID) reservation.Layout {
	t.Helper()
	var partitions, shards int
	require.NoError(t, s.Pool.QueryRow(t.Context(), "SELECT partitions, shards FROM sales WHERE id = $1", sale).
		Scan(&partitions, &shards))
	return reservation.LayoutOf(sale, partitions, shards)
}

// Everything returns the contents of Postgres and Redis.
func (s *Shop) Everything(t testing.TB) (all []string) {
	t.Helper()
	for _, table := range Rows(t, s.Pool,
		"SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1") {
		for _, row := range Rows(t, s.Pool, "SELECT row_to_json(r)::text FROM "+table+" AS r ORDER BY 1") {
			all = append(all, table+" "+row)
		}
	}
	keys, err := s.Rdb.Keys(t.Context(), s.Keys.Prefix+":*").Result()
	require.NoError(t, err)
	slices.Sort(keys)
	for _, key := range keys {
		dump, err := s.Rdb.Dump(t.Context(), key).Result()
		require.NoError(t, err)
		all = append(all, key+" "+dump)
	}
	return all
}

// Soon bounds what a test waits for. It is long, because a busy machine is slow and not wrong.
const Soon = 2 * time.Minute

// EveryByte is a text with each of the 256 bytes.
var EveryByte = func() string {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	return string(all)
}()

// Answer returns what is received, and fails the test if nothing comes.
func Answer[T any](t testing.TB, from <-chan T) (answer T) {
	t.Helper()
	select {
	case answer = <-from:
	case <-time.After(20 * time.Second):
		t.Fatal("no answer")
	}
	return answer
}

// TripCounter is a pgx tracer that counts round trips with batches of statements.
type TripCounter struct{ N atomic.Int64 }

// CountTrips returns a pool on the same database, and the counter of its round trips.
func CountTrips(t testing.TB, pool *pgxpool.Pool) (*pgxpool.Pool, *TripCounter) {
	t.Helper()
	trips := &TripCounter{}
	config := pool.Config()
	config.ConnConfig.Tracer = trips
	counted, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(counted.Close)
	return counted, trips
}

func (c *TripCounter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.N.Add(1)
	return ctx
}

func (*TripCounter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*TripCounter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (*TripCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*TripCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Metric returns the value of the gauge or counter with that label value, or without labels for
// "", and 0 if there is none.
func Metric(t testing.TB, from prometheus.Gatherer, name, label string) float64 {
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

// CountingLog is a slog.Handler that counts messages.
type CountingLog struct{ messages sync.Map }

func (l *CountingLog) Enabled(context.Context, slog.Level) bool { return true }

func (l *CountingLog) WithAttrs([]slog.Attr) slog.Handler { return l }

func (l *CountingLog) WithGroup(string) slog.Handler { return l }

func (l *CountingLog) Handle(_ context.Context, r slog.Record) error {
	n, _ := l.messages.LoadOrStore(r.Message, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	return nil
}

func (l *CountingLog) Times(message string) int {
	if n, ok := l.messages.Load(message); ok {
		return int(n.(*atomic.Int64).Load())
	}
	return 0
}
