// Package metrics holds the Prometheus metrics of a worker, which its batchers and its loops share,
// and Trouble, which reports in the log and in the metrics that a step fails and is retried.
package metrics

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/ledger"
	"stampede/lock"
	"stampede/reservation/order"
	"stampede/stream"
)

// Worker holds the metrics that all batchers of a worker share.
type Worker struct {
	BatchOrders, BatchSeconds prometheus.Histogram
	// Durable gets the time from the reservation of each order to its commit.
	Durable prometheus.Histogram

	Orders, locks *prometheus.CounterVec
	Failing       *prometheus.GaugeVec
	Releases      prometheus.Gauge
	EndedSessions prometheus.Counter
	// Retired counts sales whose buyers left Redis.
	Retired     prometheus.Counter
	OrdersAside prometheus.Gauge
	// Readers has a series for each stream.
	Readers *prometheus.GaugeVec

	partitions *prometheus.GaugeVec
	idle       string // its label
}

// The label values of stampede_orders_total beside the statuses of fresh orders.
const (
	countDuplicate = "duplicate"
	countUnusable  = "unusable"
)

// The label values of stampede_worker_failing.
const (
	StepRecord  = "record"
	StepLock    = "lock"
	StepRelease = "release"
	StepExpire  = "expire"
	StepUnblock = "unblock"
	StepBlocked = "held"
	StepRebuild = "rebuild"
	StepRetire  = "retire"
	StepName    = "name"
	StepDraw    = "draw"
	StepOffer   = "offer"
	// StepWaitlist offers units to those who wait.
	StepWaitlist = "waitlist"
	// StepPayments decides about payments that wait for their orders.
	StepPayments = "payments"
	// StepMonths makes tables for the orders of the next month.
	StepMonths = "months"
)

// New registers the metrics at reg; nil for none.
func New(reg prometheus.Registerer) (*Worker, error) {
	r := registrar{reg: reg}
	m := &Worker{
		BatchOrders: r.histogram(prometheus.HistogramOpts{
			Name: "stampede_batch_orders", Help: "Messages handled in one batch.",
			Buckets: []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000},
		}),
		BatchSeconds: r.histogram(prometheus.HistogramOpts{
			Name: "stampede_batch_duration_seconds", Help: "From locking the users of a batch to resolving its messages.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}),
		Durable: r.histogram(prometheus.HistogramOpts{
			Name:    "stampede_accept_to_durable_seconds",
			Help:    "From the reservation of an order, by the clock of Redis, to its commit in Postgres, by the clock of this worker.",
			Buckets: []float64{.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}),
		locks: register(&r, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "stampede_locks_total",
			Help: "Locks of users: acquired, busy (deferred to a later batch), released, or lost before the batch was done.",
		}, []string{"outcome"})),
		Failing: register(&r, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_worker_failing",
			Help: "Steps (record, lock and release in each partition; expire, release, draw, offer, waitlist, payments, " +
				"unblock, rebuild, retire and months in each worker) that fail and are retried; held: sales whose orders are blocked by a lock or a time limit; " +
				"name: another process uses the name of this worker.",
		}, []string{"step"})),
		Releases: register(&r, prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stampede_releases_pending",
			Help: "Ended orders whose units are not yet released in Redis, counted up to 10000. Use max.",
		})),
		EndedSessions: register(&r, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stampede_sessions_ended_total",
			Help: "Database sessions that this worker ended because others waited for their locks while their clients were " +
				"silent.",
		})),
		OrdersAside: register(&r, prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "stampede_orders_set_aside",
			Help: "Overdue orders that this worker cannot end because their records contradict each other. " +
				"The log and the audit report them.",
		})),
		Readers: register(&r, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_stream_readers",
			Help: "1 while this worker reads the stream, else 0. Use sum by (stream): it is 1, or more for a moment.",
		}, []string{"stream"})),
		partitions: register(&r, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "stampede_worker_partitions", Help: "Partitions that this worker reads; the label idle says why it reads none.",
		}, []string{"idle"})),
		Retired: register(&r, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "stampede_sales_retired_total",
			Help: "Ended sales whose buyers this worker deleted in Redis, because all of their orders are final.",
		})),
	}
	// Each series exists before its first event, which increase() would miss otherwise.
	orders, err := telemetry.OrdersByOutcome(reg,
		string(order.StatusConfirmed), string(order.StatusRejected), string(order.StatusVoided), string(order.StatusExpired),
		countDuplicate, countUnusable)
	if err := errors.Join(append(r.failed, err)...); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	m.Orders = orders
	for _, step := range []string{
		StepRecord, StepLock, StepRelease, StepExpire, StepUnblock, StepRebuild, StepRetire, StepBlocked, StepName,
		StepPayments, StepDraw, StepOffer, StepWaitlist, StepMonths,
	} {
		m.Failing.WithLabelValues(step)
	}
	m.LockObserver()
	return m, nil
}

// Reads shows how many partitions the worker reads, and why it reads none. It must not be called concurrently.
func (m *Worker) Reads(partitions int, idle string) {
	m.partitions.WithLabelValues(idle).Set(float64(partitions))
	if idle != m.idle { // only now, so that no scrape finds nothing
		m.partitions.DeleteLabelValues(m.idle)
		m.idle = idle
	}
}

// registrar registers metrics, and collects the errors.
type registrar struct {
	reg    prometheus.Registerer
	failed []error
}

func register[C prometheus.Collector](r *registrar, metric C) C {
	metric, err := telemetry.RegisterOnce(r.reg, metric)
	r.failed = append(r.failed, err)
	return metric
}

func (r *registrar) histogram(o prometheus.HistogramOpts) prometheus.Histogram {
	return register(r, prometheus.NewHistogram(telemetry.Native(o)))
}

// LockObserver counts the results of locking users.
func (m *Worker) LockObserver() lock.Observer {
	count := func(outcome string) func(int) {
		counter := m.locks.WithLabelValues(outcome)
		return func(locks int) { counter.Add(float64(locks)) }
	}
	acquired := count("acquired")
	return lock.Observer{
		Acquired: func(locks int, _ time.Duration) { acquired(locks) },
		Busy:     count("busy"),
		Lost:     count("lost"),
		Released: count("released"),
	}
}

// Count counts the outcome of a message.
func (m *Worker) Count(out ledger.Outcome) {
	label := countDuplicate
	switch {
	case errors.Is(out.Err, stream.ErrStopping):
		return // it is delivered again
	case out.Err != nil:
		label = countUnusable
	case out.Fresh:
		label = string(out.Status)
	}
	m.Orders.WithLabelValues(label).Inc()
}

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
