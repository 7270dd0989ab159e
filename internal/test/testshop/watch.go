package testshop

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

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
