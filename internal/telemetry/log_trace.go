package telemetry

import (
	"context"
	"log/slog"

	"go.opentelemetry.io/otel/trace"
)

// traceID is the field with the id of a trace.
const traceID = "trace_id"

// withTrace adds the id of the trace to what is logged with its context.
type withTrace struct{ slog.Handler }

// Handle implements slog.Handler.
func (h withTrace) Handle(ctx context.Context, record slog.Record) error {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		record.AddAttrs(slog.String(traceID, span.SpanContext().TraceID().String()))
	}
	return h.Handler.Handle(ctx, record)
}

// WithAttrs implements slog.Handler.
func (h withTrace) WithAttrs(attrs []slog.Attr) slog.Handler {
	return withTrace{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h withTrace) WithGroup(name string) slog.Handler { return withTrace{h.Handler.WithGroup(name)} }
