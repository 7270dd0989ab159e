// Package tracing makes OpenTelemetry spans and exports them by OTLP. A span is made only below a parent that was
// sampled: the traceparent of a request, of an entry of a stream, or of an event. Everything else costs nothing: a
// Tracer that is off is nil, a Span that is not recorded is the zero Span, and both can be used like any other.
package tracing
