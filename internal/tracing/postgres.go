package tracing

import (
	"context"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/metric/noop"
)

// Postgres returns the tracer of a pool's connections, nil if tracing is off. It makes spans below a recorded one only,
// with the name of each statement and without its parameters.
func (t *Tracer) Postgres(nameOf func(statement string) string) pgx.QueryTracer {
	if t == nil {
		return nil
	}
	return &statements{otelpgx.NewTracer(
		otelpgx.WithTracerProvider(t.provider), otelpgx.WithMeterProvider(noop.NewMeterProvider()),
		otelpgx.WithSpanNameFunc(nameOf), otelpgx.WithDisableSQLStatementInAttributes(),
		otelpgx.WithDisableConnectionDetailsInAttributes(),
	)}
}

// statements leaves alone what is not below a recorded span, for which otelpgx would note the time.
type statements struct{ *otelpgx.Tracer }

// TraceQueryStart implements pgx.QueryTracer.
func (s *statements) TraceQueryStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TraceQueryStart(ctx, conn, data)
}

// TraceBatchStart implements pgx.BatchTracer.
func (s *statements) TraceBatchStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TraceBatchStart(ctx, conn, data)
}

// TraceCopyFromStart implements pgx.CopyFromTracer.
func (s *statements) TraceCopyFromStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TraceCopyFromStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TraceCopyFromStart(ctx, conn, data)
}

// TraceConnectStart implements pgx.ConnectTracer.
func (s *statements) TraceConnectStart(ctx context.Context, data pgx.TraceConnectStartData) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TraceConnectStart(ctx, data)
}

// TracePrepareStart implements pgx.PrepareTracer.
func (s *statements) TracePrepareStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TracePrepareStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TracePrepareStart(ctx, conn, data)
}

// TraceAcquireStart implements pgxpool.AcquireTracer.
func (s *statements) TraceAcquireStart(
	ctx context.Context, pool *pgxpool.Pool, data pgxpool.TraceAcquireStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return s.Tracer.TraceAcquireStart(ctx, pool, data)
}
