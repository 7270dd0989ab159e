// Package otlp makes the tracers of programs, which export spans by OTLP. Who makes spans needs package tracing only,
// and not what an exporter brings with it.
package otlp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/time/rate"

	"stampede/internal/tracing"
)

const (
	// exportTimeout bounds one export with its retries.
	exportTimeout = 10 * time.Second
	// textMax bounds an attribute.
	textMax = 1024
	// logEvery is the least time between two log lines about the exporter.
	logEvery = time.Minute
)

// Config configures a tracer. The exporter is configured by the standard variables OTEL_*.
type Config struct {
	// Service is the default of OTEL_SERVICE_NAME, and Version that of the program.
	Service, Version string
	// PerSecond bounds the requests whose traces are recorded. Parents come from clients, who may send any number.
	PerSecond int
	Logger    *slog.Logger
	// Registerer receives the metrics, also if tracing is off.
	Registerer prometheus.Registerer
}

// ErrSetting is returned for a variable OTEL_* that this package cannot follow.
var ErrSetting = errors.New("a setting of OpenTelemetry is wrong")

// New returns nil, a tracer that is off, unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is
// set. It makes no connection. Its error wraps ErrSetting.
func New(ctx context.Context, config Config) (*tracing.Tracer, error) {
	m, err := newMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	if on, err := isOn(); err != nil || !on {
		return nil, err
	}
	exporter, err := otlptracehttp.New(context.WithoutCancel(ctx))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSetting, err)
	}
	of, err := resource.New(ctx,
		resource.WithService(), // the id of this instance
		resource.WithAttributes(attribute.String("service.name", config.Service),
			attribute.String("service.version", config.Version)),
		resource.WithHost(), resource.WithProcessPID(), resource.WithTelemetrySDK(),
		resource.WithFromEnv()) // the last one wins
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSetting, err)
	}
	quiet := &quietly{log: config.Logger, again: rate.Sometimes{Interval: logEvery}}
	otel.SetErrorHandler(quiet)
	otel.SetLogger(logr.FromSlogHandler(config.Logger.Handler()))
	limits := sdk.NewSpanLimits()
	limits.AttributeValueLengthLimit = textMax
	provider := sdk.NewTracerProvider(
		sdk.WithResource(of), sdk.WithRawSpanLimits(limits),
		sdk.WithSampler(sdk.ParentBased(sdk.NeverSample())), // whatever OTEL_TRACES_SAMPLER says: a crowd is no sample
		sdk.WithSpanProcessor(newQueue(exporter, m)),
	)
	return tracing.New(provider, provider.Shutdown, config.PerSecond, m.overRate.Inc), nil
}

// isOn reads whether spans are to be exported. Its error wraps ErrSetting.
func isOn() (bool, error) {
	endpoint := setting("ENDPOINT")
	exporter := os.Getenv("OTEL_TRACES_EXPORTER")
	if endpoint == "" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || exporter == "none" {
		return false, nil
	}
	if exporter != "" && exporter != "otlp" {
		return false, fmt.Errorf("%w: OTEL_TRACES_EXPORTER is %q, want otlp or none", ErrSetting, exporter)
	}
	if protocol := setting("PROTOCOL"); protocol != "" && protocol != "http/protobuf" {
		return false, fmt.Errorf("%w: OTEL_EXPORTER_OTLP_PROTOCOL is %q, want http/protobuf (port 4318 of most collectors)",
			ErrSetting, protocol)
	}
	at, err := url.Parse(endpoint)
	if err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Host == "" {
		return false, fmt.Errorf("%w: OTEL_EXPORTER_OTLP_ENDPOINT must be like http://collector:4318", ErrSetting)
	}
	return true, nil
}

// setting reads a variable of the exporter, whose form for traces wins.
func setting(name string) string {
	return cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_"+name), os.Getenv("OTEL_EXPORTER_OTLP_"+name))
}

// quietly logs what goes wrong in the exporter now and then: each batch may fail.
type quietly struct {
	log   *slog.Logger
	again rate.Sometimes
}

// Handle implements otel.ErrorHandler.
func (q *quietly) Handle(err error) {
	q.again.Do(func() { q.log.Warn("spans are not exported: the rest works without", "error", err) })
}
