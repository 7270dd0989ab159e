package tracing

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
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
type Span struct{ of trace.Span }

// Of returns the span that is recorded in this context.
func Of(ctx context.Context) Span {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		return Span{span}
	}
	return Span{}
}

// On reports whether the span is recorded.
func (s Span) On() bool { return s.of != nil }

// In returns a context below ctx with the span in it.
func (s Span) In(ctx context.Context) context.Context {
	if s.of == nil {
		return ctx
	}
	return trace.ContextWithSpan(ctx, s.of)
}

// Start starts a span below this one, with links to the spans of other traceparents.
func (s Span) Start(kind Kind, name string, links ...string) Span {
	if s.of == nil {
		return Span{}
	}
	ctx := trace.ContextWithSpan(context.Background(), s.of)
	_, span := s.of.TracerProvider().Tracer(scope).Start(ctx, name, options(kind, links)...)
	return Span{span}
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
	if s.of == nil {
		return
	}
	if to, ok := parse(parent); ok {
		s.of.AddLink(trace.Link{SpanContext: to})
	}
}

// Parent returns the traceparent with which other processes continue below this span, "" if it is not recorded.
func (s Span) Parent() string {
	if s.of == nil {
		return ""
	}
	of := s.of.SpanContext()
	return "00-" + of.TraceID().String() + "-" + of.SpanID().String() + "-" + of.TraceFlags().String()
}

// Text sets an attribute.
func (s Span) Text(name, value string) {
	if s.of != nil {
		s.of.SetAttributes(attribute.String(name, value))
	}
}

// Number sets an attribute.
func (s Span) Number(name string, value int64) {
	if s.of != nil {
		s.of.SetAttributes(attribute.Int64(name, value))
	}
}

// Fail marks the span as failed, unless the error is nil.
func (s Span) Fail(err error) {
	if s.of != nil && err != nil {
		s.of.SetStatus(codes.Error, err.Error())
	}
}

// End ends the span, once.
func (s Span) End() {
	if s.of != nil {
		s.of.End()
	}
}
