package otlp

import (
	"context"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"stampede/internal/telemetry"
)

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
