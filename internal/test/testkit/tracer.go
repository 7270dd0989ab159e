package testkit

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/tracing"
	"stampede/internal/tracing/otlp"
)

// Tracer returns a tracer that exports to a Collector soon. The test must not be parallel: the tracer reads the
// environment.
func Tracer(t *testing.T) (*tracing.Tracer, *Collector) {
	t.Helper()
	collector := NewCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "10") // ms
	tracer, err := otlp.New(t.Context(), otlp.Config{
		Service: "test", PerSecond: 1000, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	t.Cleanup(tracer.Close)
	return tracer, collector
}
