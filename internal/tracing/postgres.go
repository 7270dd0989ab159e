package tracing

import (
	"context"
	"encoding/binary"
	"io"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"
)

// Postgres makes spans of the statements of a pool's connections, below a recorded span only. They have the name of
// each statement, and neither its text nor its parameters. A Tracer that is off changes nothing.
func (t *Tracer) Postgres(config *pgx.ConnConfig, nameOf func(statement string) string) {
	if t == nil {
		return
	}
	s := &statements{nameOf: nameOf}
	config.Tracer = s
	config.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		return pgproto3.NewFrontend(r, &promptly{w, &s.batches})
	}
}

type statements struct {
	nameOf func(statement string) string
	// batches are the traced ones that are not answered.
	batches atomic.Int64
}

// start starts a span of a call to the server, below the one of the context if that is recorded.
func start(ctx context.Context, name string, config *pgx.ConnConfig, options ...trace.SpanStartOption) Span {
	span := Current(ctx).start(Client, name, nil, options...)
	if span.On() {
		span.Text("db.system.name", "postgresql")
		span.Text("db.query.summary", name)
		span.Text("db.namespace", config.Database)
		span.Text("server.address", config.Host)
		span.Number("server.port", int64(config.Port))
	}
	return span
}

// TraceQueryStart implements pgx.QueryTracer. The time of its PREPARE belongs to a statement.
func (s *statements) TraceQueryStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	return start(ctx, s.nameOf(data.SQL), conn.Config()).In(ctx)
}

// TraceQueryEnd implements pgx.QueryTracer.
func (*statements) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	Current(ctx).end(data.Err)
}

// TraceAcquireStart implements pgxpool.AcquireTracer.
func (*statements) TraceAcquireStart(
	ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData,
) context.Context {
	return Current(ctx).Start(Internal, "wait for a connection").In(ctx)
}

// TraceAcquireEnd implements pgxpool.AcquireTracer.
func (*statements) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, data pgxpool.TraceAcquireEndData) {
	Current(ctx).end(data.Err)
}

// TraceBatchStart implements pgx.BatchTracer.
func (s *statements) TraceBatchStart(
	ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData,
) context.Context {
	if !Current(ctx).On() {
		return ctx
	}
	span := start(ctx, "BATCH", conn.Config())
	span.Number("db.operation.batch.size", int64(data.Batch.Len()))
	s.batches.Add(1)
	return span.In(ctx)
}

// TraceBatchQuery implements pgx.BatchTracer. A statement lasts from the answer to the one before to its own.
func (s *statements) TraceBatchQuery(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchQueryData) {
	if Current(ctx).On() {
		start(ctx, s.nameOf(data.SQL), conn.Config(), trace.WithTimestamp(data.ReadStartTime)).end(data.Err)
	}
}

// TraceBatchEnd implements pgx.BatchTracer. pgx calls it twice for a batch that it could not send: the span is not
// recorded any more then.
func (s *statements) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	if span := Current(ctx); span.On() {
		s.batches.Add(-1)
		span.end(data.Err)
	}
}

// promptly has the server answer each statement while a traced batch is under way. Otherwise the server keeps the
// answers until the last one, and the first statement would seem to take the time of all.
type promptly struct {
	io.Writer
	batches *atomic.Int64
}

// Write implements io.Writer. A frontend of pgx writes whole messages: a type, and a length that counts itself.
func (p *promptly) Write(messages []byte) (int, error) {
	if p.batches.Load() == 0 {
		return p.Writer.Write(messages)
	}
	const header, execute = 5, 'E'
	flush := []byte{'H', 0, 0, 0, header - 1}
	with := make([]byte, 0, 2*len(messages))
	rest := messages
	for len(rest) >= header {
		n := 1 + int(binary.BigEndian.Uint32(rest[1:]))
		if n > len(rest) {
			break
		}
		if with = append(with, rest[:n]...); rest[0] == execute {
			with = append(with, flush...)
		}
		rest = rest[n:]
	}
	n, err := p.Writer.Write(append(with, rest...))
	return min(n, len(messages)), err
}
