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

// NewTrouble returns a Trouble for one of the steps; doing names it in the log.
func NewTrouble(logger *slog.Logger, m *Worker, step, doing string) *Trouble {
	return &Trouble{outage: retry.Outage{Log: logger, Doing: doing}, gauge: m.Failing.WithLabelValues(step)}
}

// Failed records a failure, and returns how long to wait before a retry.
func (t *Trouble) Failed(err error) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.outage.Lasts() {
		t.gauge.Inc()
	}
	return t.outage.Failed(err)
}

// Over records a success.
func (t *Trouble) Over() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.outage.Lasts() {
		t.gauge.Dec()
	}
	t.outage.Over()
}

// End forgets a failure, of a step that is not tried any more.
func (t *Trouble) End() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.outage.Lasts() {
		t.gauge.Dec()
	}
	t.outage = retry.Outage{Log: t.outage.Log, Doing: t.outage.Doing}
}

// Note records a failure or a success, for a step with its own interval.
func (t *Trouble) Note(err error) {
	if err != nil {
		t.Failed(err)
	} else {
		t.Over()
	}
}

// Lasts reports whether the last attempt failed.
func (t *Trouble) Lasts() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.outage.Lasts()
}
