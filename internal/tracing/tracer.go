// Package tracing makes OpenTelemetry spans. A span is made only below a parent that was sampled: the traceparent of a
// request, of an entry of a stream, or of an event. Everything else costs nothing: a Tracer that is off is nil, a Span
// that is not recorded is the zero Span, and both can be used like any other. Package otlp makes Tracers that export.
package tracing

import (
	"context"
	"net/http"
	"time"

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
