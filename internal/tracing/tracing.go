// Package tracing makes OpenTelemetry spans. A span is made only below a parent that was sampled: the traceparent of a
// request, of an entry of a stream, or of an event. Everything else costs nothing: a Tracer that is off is nil, a Span
// that is not recorded is the zero Span, and both can be used like any other. Package otlp makes Tracers that export.
package tracing

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
)

// closeTimeout bounds the export of the last spans at a stop.
const closeTimeout = 3 * time.Second

// Tracer makes spans. Nil is a Tracer that makes none. It is safe for concurrent use.
type Tracer struct {
	provider trace.TracerProvider
	shutdown func(context.Context) error
	requests *rate.Limiter
	overRate func()
}

// New returns a Tracer whose spans come from the provider, which shutdown ends. perSecond bounds the requests whose
// traces are recorded, because parents come from clients, who may send any number; overRate is called for each other.
func New(provider trace.TracerProvider, shutdown func(context.Context) error, perSecond int, overRate func()) *Tracer {
	return &Tracer{
		provider: provider, shutdown: shutdown, requests: rate.NewLimiter(rate.Limit(perSecond), perSecond),
		overRate: overRate,
	}
}

// Close exports the last spans, for at most closeTimeout.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = t.shutdown(ctx) // what is lost is counted
}

// Request starts the span of a request that has a sampled parent, unless too many have.
func (t *Tracer) Request(header http.Header, name string) Span {
	if t == nil {
		return Span{}
	}
	values := header["Traceparent"]
	if len(values) != 1 {
		return Span{}
	}
	parent, sampled := parse(values[0])
	if !sampled {
		return Span{}
	}
	if !t.requests.Allow() {
		t.overRate()
		return Span{}
	}
	return t.start(parent, Server, name, nil)
}

// Continue starts a span below one of another process, if its traceparent is a sampled one.
func (t *Tracer) Continue(kind Kind, name, parent string, links ...string) Span {
	if t == nil || parent == "" {
		return Span{}
	}
	of, sampled := parse(parent)
	if !sampled {
		return Span{}
	}
	return t.start(of, kind, name, links)
}

// Past makes the span of a time that is over, below one of another process. The clocks of the two may differ.
func (t *Tracer) Past(name, parent string, began, ended time.Time) {
	if t == nil {
		return
	}
	if of, sampled := parse(parent); sampled {
		if began.After(ended) {
			began = ended
		}
		span := t.start(of, Internal, name, nil, trace.WithTimestamp(began))
		if span.On() {
			span.span.End(trace.WithTimestamp(ended))
		}
	}
}

func (t *Tracer) start(
	parent trace.SpanContext, kind Kind, name string, links []string, more ...trace.SpanStartOption,
) Span {
	ctx := trace.ContextWithRemoteSpanContext(context.Background(), parent)
	_, span := scoped(t.provider).Start(ctx, name, append(options(kind, links), more...)...)
	if !span.IsRecording() { // the provider is closed
		return Span{}
	}
	return Span{span}
}

// scope names this code in every span.
const scope = "stampede"

// Kind says what a span is to its parent.
type Kind = trace.SpanKind

// The kinds of spans.
const (
	Internal = trace.SpanKindInternal
	Server   = trace.SpanKindServer
	Client   = trace.SpanKindClient
	Producer = trace.SpanKindProducer
	Consumer = trace.SpanKindConsumer
)

// Span is a part of a trace. The methods of the zero Span, which is not recorded, do nothing. It is safe for concurrent
// use.
type Span struct{ span trace.Span }

// Current returns the span that is recorded in this context.
func Current(ctx context.Context) Span {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		return Span{span}
	}
	return Span{}
}

// On reports whether the span is recorded.
func (s Span) On() bool { return s.span != nil }

// In returns a context below ctx with the span in it.
func (s Span) In(ctx context.Context) context.Context {
	if s.span == nil {
		return ctx
	}
	return trace.ContextWithSpan(ctx, s.span)
}

// Start starts a span below this one, with links to the spans of other traceparents.
func (s Span) Start(kind Kind, name string, links ...string) Span { return s.start(kind, name, links) }

func (s Span) start(kind Kind, name string, links []string, more ...trace.SpanStartOption) Span {
	if s.span == nil {
		return Span{}
	}
	ctx := trace.ContextWithSpan(context.Background(), s.span)
	_, span := scoped(s.span.TracerProvider()).Start(ctx, name, append(options(kind, links), more...)...)
	return Span{span}
}

// Redis starts the span of a call of a script in Redis below this one.
func (s Span) Redis(script string, links ...string) Span {
	span := s.Start(Client, script, links...)
	span.Text("db.system.name", "redis")
	span.Text("db.operation.name", "EVALSHA")
	span.Text("db.query.summary", script)
	return span
}

// scoped names this code, and the version of the conventions that attributes follow.
func scoped(provider trace.TracerProvider) trace.Tracer {
	return provider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL))
}

func options(kind Kind, links []string) []trace.SpanStartOption {
	to := make([]trace.Link, 0, len(links))
	for _, link := range links {
		if parent, ok := parse(link); ok {
			to = append(to, trace.Link{SpanContext: parent})
		}
	}
	return []trace.SpanStartOption{trace.WithSpanKind(kind), trace.WithLinks(to...)}
}

// Link adds a link to the span of a traceparent.
func (s Span) Link(parent string) {
	if s.span == nil {
		return
	}
	if to, ok := parse(parent); ok {
		s.span.AddLink(trace.Link{SpanContext: to})
	}
}

// Parent returns the traceparent with which other processes continue below this span, "" if it is not recorded.
func (s Span) Parent() string {
	if s.span == nil {
		return ""
	}
	at := s.span.SpanContext()
	return "00-" + at.TraceID().String() + "-" + at.SpanID().String() + "-" + at.TraceFlags().String()
}

// Text sets an attribute.
func (s Span) Text(name, value string) {
	if s.span != nil {
		s.span.SetAttributes(attribute.String(name, value))
	}
}

// Number sets an attribute.
func (s Span) Number(name string, value int64) {
	if s.span != nil {
		s.span.SetAttributes(attribute.Int64(name, value))
	}
}

// Fail marks the span as failed, unless the error is nil. The span gets the kind of the error only: its text may name a
// buyer.
func (s Span) Fail(err error) {
	if s.span == nil || err == nil {
		return
	}
	refusal, isPostgres := errors.AsType[*pgconn.PgError](err)
	if isPostgres {
		s.Text("db.response.status_code", refusal.Code)
	}
	answer, isRedis := errors.AsType[redis.Error](err)
	network, isNetwork := errors.AsType[net.Error](err)
	switch {
	case isPostgres:
		s.FailAs(refusal.Code)
	case isRedis:
		code, _, _ := strings.Cut(answer.Error(), " ")
		s.FailAs(code)
	case errors.Is(err, context.Canceled):
		s.FailAs("canceled")
	case errors.Is(err, context.DeadlineExceeded), isNetwork && network.Timeout():
		s.FailAs("timeout")
	default:
		s.FailAs("_OTHER")
	}
}

// FailAs marks the span as failed by an error of this kind, of which there are few.
func (s Span) FailAs(kind string) {
	if s.span != nil {
		s.Text("error.type", kind)
		s.span.SetStatus(codes.Error, "")
	}
}

func (s Span) end(err error) {
	s.Fail(err)
	s.End()
}

// End ends the span, once.
func (s Span) End() {
	if s.span != nil {
		s.span.End()
	}
}

const (
	// parentLength is that of a traceparent of version 00: version, trace id, span id and flags, in hexadecimal.
	parentLength = 2 + 1 + 32 + 1 + 16 + 1 + 2
	// parentMax bounds a traceparent of a later version, which may be longer.
	parentMax = 256
)

// Sampled reports whether text is a valid traceparent (W3C Trace Context, level 1) of a trace that is recorded.
func Sampled(text string) bool {
	_, ok := parse(text)
	return ok
}

// ID returns the id of the trace of a sampled traceparent, "" of anything else.
func ID(text string) string {
	if parent, sampled := parse(text); sampled {
		return parent.TraceID().String()
	}
	return ""
}

// parse returns the context of a sampled parent. It does not allocate.
func parse(text string) (parent trace.SpanContext, sampled bool) {
	if len(text) < parentLength || len(text) > parentMax || text[2] != '-' || text[35] != '-' || text[52] != '-' {
		return parent, false
	}
	var version, flags [1]byte
	var config trace.SpanContextConfig
	if !decode(version[:], text[:2]) || !decode(config.TraceID[:], text[3:35]) || !decode(config.SpanID[:], text[36:52]) ||
		!decode(flags[:], text[53:55]) {
		return parent, false
	}
	longer := len(text) > parentLength
	if version[0] == 0xff || version[0] == 0 && longer || longer && text[parentLength] != '-' {
		return parent, false
	}
	config.TraceFlags, config.Remote = trace.TraceFlags(flags[0])&trace.FlagsSampled, true
	parent = trace.NewSpanContext(config)
	return parent, parent.IsValid() && parent.IsSampled()
}

// decode reads hexadecimal digits in lower case.
func decode(dst []byte, digits string) bool {
	for i := range len(digits) {
		if c := digits[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	n, err := hex.Decode(dst, []byte(digits))
	return err == nil && n == len(dst)
}

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
