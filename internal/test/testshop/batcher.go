package testshop

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

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
