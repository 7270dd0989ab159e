package tracing

import (
	"context"
	"encoding/hex"
	"errors"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

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
