package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
	"stampede/internal/tracing"
)

// profileFlag is for services with a listener for operators.
type profileFlag struct {
	Pprof bool `name:"pprof" help:"Serve profiles of this process below /debug/pprof/ at --metrics-addr, for go tool pprof. Only operators may reach that address."`
}

// check refuses profiles without a listener for operators: the one for buyers never has them.
func (f profileFlag) check(metricsAddr string) error {
	if f.Pprof && metricsAddr == "" {
		return usagef("--pprof needs a listener for operators: set STAMPEDE_METRICS_ADDR or --metrics-addr, as in " +
			"127.0.0.1:9092")
	}
	return nil
}

// serve answers operators at an address until ctx is done.
func (f profileFlag) serve(
	ctx context.Context, addr string, registry *prometheus.Registry, ready func(context.Context) error,
) error {
	var options []telemetry.Option
	if f.Pprof {
		options = append(options, telemetry.Profiles)
	}
	return listenError(telemetry.Serve(ctx, addr, registry, ready, options...), "STAMPEDE_METRICS_ADDR", "--metrics-addr")
}

// optionalMetricsAddr is for services whose metrics are on the port of the HTTP API as well.
type optionalMetricsAddr struct {
	MetricsAddr string `placeholder:"HOST:PORT" help:"Address of a second listener, for operators, with /metrics, /livez and /readyz (default: none; they are at --http-addr in any case)."`
}

// traceFlag bounds what clients can have traced.
type traceFlag struct {
	TracesPerSecond int `default:"100" placeholder:"N" help:"Requests a second that are traced at most, of those whose client sends a sampled traceparent; 0: none. Traces are on if OTEL_EXPORTER_OTLP_ENDPOINT is set (${default})."`
}

func (f traceFlag) Validate() error { return wantAtLeast("--traces-per-second", f.TracesPerSecond, 0) }

// tracer returns the tracer of a service, which is off unless an OTLP endpoint is set. The caller closes it.
func (f traceFlag) tracer(
	ctx context.Context, service string, registry prometheus.Registerer, logger *slog.Logger,
) (*tracing.Tracer, error) {
	tracer, err := tracing.New(ctx, tracing.Config{
		Service: service, Version: telemetry.BuildVersion(), PerSecond: f.TracesPerSecond, Logger: logger,
		Registerer: registry,
	})
	if errors.Is(err, tracing.ErrSetting) {
		err = &usageError{err}
	}
	return tracer, err
}
