package metrics

import (
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
)

// Trouble is an outage that the metrics show as well. It is safe for concurrent use.
type Trouble struct {
	mu     sync.Mutex
	outage retry.Outage
	gauge  prometheus.Gauge
}

func NewTrouble(logger *slog.Logger, metrics *Worker, step, doing string) *Trouble {
	return &Trouble{outage: retry.Outage{Log: logger, Doing: doing}, gauge: metrics.Failing.WithLabelValues(step)}
}

func (t *Trouble) Failed(err error) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.outage.Lasts() {
		t.gauge.Inc()
	}
	return t.outage.Failed(err)
}

func (t *Trouble) Over() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.outage.Lasts() {
		t.gauge.Dec()
	}
	t.outage.Over()
}

// Note records either, for a step that is retried at its own pace.
func (t *Trouble) Note(err error) {
	if err != nil {
		t.Failed(err)
	} else {
		t.Over()
	}
}

func (t *Trouble) Lasts() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.outage.Lasts()
}
