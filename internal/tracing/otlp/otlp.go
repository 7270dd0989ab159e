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
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/time/rate"

	"stampede/internal/telemetry"
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

const (
	// queueMax is how many ended spans may wait for their export, those under way included. batchMax are sent together.
	queueMax = 4096
	batchMax = 512
)

type metrics struct{ exported, dropped, overRate prometheus.Counter }

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	spans := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_trace_spans_total",
		Help: "Spans by result: exported, or dropped because the collector did not take them in time.",
	}, []string{"result"})
	overRate := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_traces_over_rate_total",
		Help: "Requests with a sampled parent that were not traced, because there were too many.",
	})
	spans, err := telemetry.RegisterOnce(registerer, spans)
	if err != nil {
		return nil, err
	}
	if overRate, err = telemetry.RegisterOnce(registerer, overRate); err != nil {
		return nil, err
	}
	return &metrics{spans.WithLabelValues("exported"), spans.WithLabelValues("dropped"), overRate}, nil
}

// queue is the bounded queue in front of the exporter. The processor of the SDK has one too, but does not say what it
// drops. So this one counts the spans in it, and lets no more in than it has room for.
type queue struct {
	sdk.SpanProcessor
	metrics *metrics
	waiting atomic.Int64
	// hurry ends when a stop has waited long enough: so do all exports. ended is closed when there are no more.
	hurry context.Context //nolint:containedctx // of exports that the SDK starts
	stop  context.CancelFunc
	ended chan struct{}
}

func newQueue(exporter sdk.SpanExporter, m *metrics) *queue {
	q := &queue{metrics: m, ended: make(chan struct{})}
	q.hurry, q.stop = context.WithCancel(context.Background())
	q.SpanProcessor = sdk.NewBatchSpanProcessor(&countedExporter{exporter, q},
		sdk.WithMaxQueueSize(queueMax+batchMax), sdk.WithMaxExportBatchSize(batchMax), sdk.WithExportTimeout(exportTimeout))
	return q
}

// OnEnd implements sdk.SpanProcessor.
func (q *queue) OnEnd(span sdk.ReadOnlySpan) {
	if q.waiting.Add(1) > queueMax {
		q.waiting.Add(-1)
		q.metrics.dropped.Inc()
		return
	}
	q.SpanProcessor.OnEnd(span)
}

// Shutdown implements sdk.SpanProcessor. What is not exported when ctx ends is dropped. The SDK would go on in the
// background, for ten seconds with each batch.
func (q *queue) Shutdown(ctx context.Context) error {
	err := q.SpanProcessor.Shutdown(ctx)
	q.stop()
	<-q.ended
	return err
}

// countedExporter counts what becomes of the spans in the queue.
type countedExporter struct {
	sdk.SpanExporter
	queue *queue
}

// ExportSpans implements sdk.SpanExporter.
func (e *countedExporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.queue.hurry, cancel)()
	err := e.queue.hurry.Err()
	if err == nil {
		err = e.SpanExporter.ExportSpans(ctx, spans)
	}
	e.queue.waiting.Add(-int64(len(spans)))
	if err == nil {
		e.queue.metrics.exported.Add(float64(len(spans)))
	} else {
		e.queue.metrics.dropped.Add(float64(len(spans)))
	}
	return err
}

// Shutdown implements sdk.SpanExporter. It is called behind the last export.
func (e *countedExporter) Shutdown(ctx context.Context) error {
	defer close(e.queue.ended)
	return e.SpanExporter.Shutdown(ctx)
}
