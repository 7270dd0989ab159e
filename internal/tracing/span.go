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
func (s Span) Start(kind Kind, name string, links ...string) Span {
	if s.span == nil {
		return Span{}
	}
	ctx := trace.ContextWithSpan(context.Background(), s.span)
	_, span := s.span.TracerProvider().Tracer(scope).Start(ctx, name, options(kind, links)...)
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

// Fail marks the span as failed, unless the error is nil.
func (s Span) Fail(err error) {
	if s.span != nil && err != nil {
		s.span.SetStatus(codes.Error, err.Error())
	}
}

// End ends the span, once.
func (s Span) End() {
	if s.span != nil {
		s.span.End()
	}
}
