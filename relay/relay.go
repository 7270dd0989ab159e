// Package relay delivers the events of orders and sales to others: webhooks, streams in Redis, topics of Kafka,
// standard output. Each target gets every event at least once, the events of an order in the order of its
// versions, and none before its transaction is committed.
//
// Several processes share the targets. The one that has the lock of a target claims it by a new fence in its row of
// relay_targets, and moves its position only under that fence. So the lock saves double work, and the row decides: a
// process that was replaced can send an event again, but not move the position.
//
// # Reading order
//
// relay (which targets this process serves), session (one target: look, read, send, move), lanes (several events at the
// same time, those of one subject in line), backoff, sender, metrics. Package feed reads the log, target holds the
// table, webhook and broker send.
package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/connect"
	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/lock"
	"stampede/relay/broker"
	"stampede/relay/feed"
	"stampede/relay/target"
	"stampede/relay/webhook"
	"stampede/reservation"
)

const (
	defaultScan  = time.Second
	defaultLease = 10 * time.Second
	defaultDrain = 10 * time.Second
)

// Config is what a Relay needs.
type Config struct {
	Pool *pgxpool.Pool
	// Redis has the locks of the targets.
	Redis redis.UniversalClient
	Keys  reservation.Keys
	// Name names this process for people.
	Name string
	// Source is the source of all events.
	Source string
	// DrainTimeout is how long a stopping relay waits for the events in flight; 10 s by default.
	DrainTimeout time.Duration
	// Scan is how often the targets are read; a second by default. Lease is how long a dead process keeps its targets;
	// 10 s by default.
	Scan, Lease time.Duration
	// Stdout is where the events for a target stdout go.
	Stdout io.Writer
	// TLS is for receivers of webhooks with certificates of other authorities than those of the system.
	TLS        *tls.Config
	Agent      string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	// Tracer traces the deliveries of traced events; nil for none.
	Tracer *tracing.Tracer
}

func (c *Config) setDefaults() {
	if c.DrainTimeout == 0 {
		c.DrainTimeout = defaultDrain
	}
	if c.Scan == 0 {
		c.Scan = defaultScan
	}
	if c.Lease == 0 {
		c.Lease = defaultLease
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Stdout == nil {
		c.Stdout = io.Discard
	}
}

// Relay serves as many of the targets as no other process serves.
type Relay struct {
	config  Config
	targets *target.Store
	locker  *lock.Locker
	metrics *metrics
	stdout  *broker.Lines

	mu      sync.Mutex
	serving map[string]struct{}
	outages map[string]*retry.Outage
	// ended has room for one signal: a target is not served any more.
	ended chan struct{}
}

// New returns a Relay, and registers its metrics.
func New(config Config) (*Relay, error) {
	config.setDefaults()
	m, err := newMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	return &Relay{
		config: config, targets: target.NewStore(config.Pool), metrics: m,
		stdout:  broker.NewLines(config.Stdout),
		locker:  lock.New(config.Redis, lock.WithPrefix(config.Keys.RelayLocker()), lock.WithLease(config.Lease)),
		serving: map[string]struct{}{}, outages: map[string]*retry.Outage{}, ended: make(chan struct{}, 1),
	}, nil
}

// Run serves targets until ctx is done, and then waits for the events in flight for at most DrainTimeout.
func (r *Relay) Run(ctx context.Context) error {
	var sessions sync.WaitGroup
	outage := retry.Outage{Log: r.config.Logger, Doing: "read the targets of the relay"}
	for ctx.Err() == nil {
		all, err := r.list(ctx)
		if ctx.Err() != nil {
			break
		}
		outage.Note(err)
		if err == nil {
			r.metrics.update(all, time.Now())
		}
		for i := range all {
			if t := &all[i]; t.State == target.Active && r.begin(t.Name) {
				sessions.Go(func() {
					defer r.end(t.Name)
					r.serve(ctx, t.Name)
				})
			}
		}
		select {
		case <-ctx.Done():
		case <-r.ended:
			retry.Pause(r.config.Scan/10, ctx.Done()) // a target that fails at once does not make this spin
		case <-time.After(r.config.Scan):
		}
	}
	sessions.Wait()
	closing, cancel := retry.ForCall(ctx)
	defer cancel()
	_ = r.locker.Close(closing) // what is left ends with its lease
	return nil
}

func (r *Relay) list(ctx context.Context) ([]target.Standing, error) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	return r.targets.List(ctx)
}

// begin returns false if the target is served already.
func (r *Relay) begin(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, served := r.serving[name]; served {
		return false
	}
	r.serving[name] = struct{}{}
	return true
}

func (r *Relay) end(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.serving, name)
}

// serve serves a target if no other process does, until another one has claimed it, an operator has changed it, an
// error ends the session, or ctx ends.
func (r *Relay) serve(ctx context.Context, name string) {
	outage := r.targetOutage(name)
	key := r.config.Keys.RelayLock(name)
	lease, err := r.locker.TryAcquire(ctx, key)
	if errors.Is(err, lock.ErrBusy) || errors.Is(err, context.Canceled) {
		return
	}
	if err != nil {
		retry.Pause(outage.Failed(fmt.Errorf("lock the target: %w", err)), ctx.Done())
		return
	}
	err = r.deliver(ctx, name)
	releasing, cancel := retry.ForCall(ctx)
	defer cancel()
	_ = lease.Release(releasing) // a lease that was lost is no harm: the fence decides
	switch {
	case err == nil:
	case errors.Is(err, target.ErrStale), errors.Is(err, target.ErrNotFound):
		r.config.Logger.Info("a target is served by another process, or was changed", "target", name)
		outage.Over()
	default:
		retry.Pause(outage.Failed(err), ctx.Done())
	}
	select {
	case r.ended <- struct{}{}:
	default:
	}
}

// targetOutage returns the outage of a target, which only the one session of the target uses.
func (r *Relay) targetOutage(name string) *retry.Outage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.outages[name] == nil {
		r.outages[name] = &retry.Outage{Log: r.config.Logger.With("target", name), Doing: "serve a target of the relay"}
	}
	return r.outages[name]
}

// deliver claims the target and serves it on a connection of its own.
func (r *Relay) deliver(ctx context.Context, name string) error {
	calling, cancel := retry.ForCall(ctx)
	defer cancel()
	pooled, err := r.config.Pool.Acquire(calling)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	defer pooled.Release()
	conn := pooled.Conn()
	t, err := target.Claim(calling, conn, name, r.config.Name)
	if err != nil {
		return err
	}
	s, err := r.newSession(t, conn)
	if err != nil {
		return err
	}
	r.metrics.serving.WithLabelValues(name).Set(1)
	defer r.metrics.stop(name)
	return s.run(ctx)
}

// sender sends events to one target. It is safe for concurrent use.
type sender interface {
	// Send returns nil when the receiver has the event.
	Send(ctx context.Context, e *feed.Event) error
	// InFlight is how many calls of Send are useful at the same time.
	InFlight() int
	Close() error
}

// open returns the sender of a target. It makes no connection.
func (r *Relay) open(t *target.Target, to *target.Address) (sender, error) {
	switch to.Kind {
	case target.Webhook:
		return webhook.New(webhook.Config{
			URL: to.URL, Secrets: t.Secrets, AllowPrivate: t.AllowPrivate, TLS: r.config.TLS, Agent: r.config.Agent,
		}), nil
	case target.RedisStream:
		client, err := connect.Control(to.URL)
		if err != nil {
			return nil, err
		}
		return broker.NewStream(client, to.Stream, to.MaxLen)
	case target.Kafka:
		return broker.NewTopic(to.Brokers, to.Topic, r.config.Agent)
	case target.Stdout:
		return r.stdout, nil
	}
	return nil, fmt.Errorf("a target of the kind %s", to.Kind)
}

// tracedSender makes a span for each try to deliver an event that is traced. The receiver continues below it.
type tracedSender struct {
	sender
	tracer *tracing.Tracer
	to     *target.Address
	name   string
}

func (s *tracedSender) Send(ctx context.Context, e *feed.Event) error {
	span := s.tracer.Continue(tracing.Producer, "deliver event", e.TraceParent)
	if !span.On() {
		return s.sender.Send(ctx, e)
	}
	defer span.End()
	span.Text("messaging.system", string(s.to.Kind))
	span.Text("messaging.operation.name", "deliver")
	span.Text("messaging.operation.type", "send")
	span.Text("messaging.destination.name", s.name)
	span.Text("stampede.event_id", e.ID)
	span.Text("stampede.order_id", e.Subject)
	span.Number("stampede.position", e.Position)
	sent := *e
	sent.TraceParent = span.Parent()
	err := s.sender.Send(span.In(ctx), &sent)
	span.Fail(err)
	return err
}

const (
	backoffFirst = time.Second
	backoffMax   = 24 * time.Hour
	backoffMin   = 50 * time.Millisecond
)

// backoff is the pause after so many failures in a row: random, up to a limit that doubles from a second to a day (full
// jitter, https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). A receiver that asks for a longer
// pause gets it.
func backoff(failures int, err error) time.Duration {
	limit := backoffMax
	if shift := failures - 1; shift < 20 && backoffFirst<<shift < backoffMax {
		limit = backoffFirst << shift
	}
	pause := max(backoffMin, rand.N(limit))
	if refusal, ok := errors.AsType[*webhook.Refusal](err); ok {
		pause = max(pause, refusal.RetryAfter)
	}
	return pause
}

// isFinal reports whether the receiver wants no more events.
func isFinal(err error) bool {
	refusal, ok := errors.AsType[*webhook.Refusal](err)
	return ok && refusal.Final()
}

const labelTarget = "target"

// sameInEach says how a gauge is to be aggregated that is the same in each relay.
const sameInEach = "Use max by (target)."

// metrics have series for each target, from the moment at which it is known.
type metrics struct {
	lagEvents, lagSeconds, failing, state, serving, held *prometheus.GaugeVec
	deliveries, failures                                 *prometheus.CounterVec
	seconds                                              *prometheus.HistogramVec

	mu    sync.Mutex
	known map[string]struct{}
}

// targetMetrics are the metrics of one target.
type targetMetrics struct {
	deliveries, failures prometheus.Counter
	seconds              prometheus.Observer
	held                 prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	var errs []error
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		vec, err := telemetry.RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help},
			append([]string{labelTarget}, labels...)))
		errs = append(errs, err)
		return vec
	}
	counter := func(name, help string) *prometheus.CounterVec {
		vec, err := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help},
			[]string{labelTarget}))
		errs = append(errs, err)
		return vec
	}
	seconds, err := telemetry.RegisterOnce(reg, prometheus.NewHistogramVec(telemetry.Native(prometheus.HistogramOpts{
		Name: "stampede_relay_delivery_duration_seconds", Help: "One try to send an event.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
	}), []string{labelTarget}))
	errs = append(errs, err)
	m := &metrics{
		lagEvents: gauge("stampede_relay_lag_events", "Positions between the newest event and those that the target has. "+sameInEach),
		lagSeconds: gauge("stampede_relay_lag_seconds",
			"Age of the oldest event that the target lacks; 0 if it has all of them. "+sameInEach),
		failing: gauge("stampede_relay_failing", "Failures of the target in a row, since its last success. "+sameInEach),
		state: gauge("stampede_relay_target_state", "1 for the state of the target, 0 for the others. "+sameInEach,
			"state"),
		serving: gauge("stampede_relay_serving", "1 while this process sends events to the target, else 0. Use sum by (target)."),
		held: gauge("stampede_relay_held_seconds",
			"How long an open transaction has kept newer events from being sent to the target."),
		deliveries: counter("stampede_relay_deliveries_total", "Events that the target has taken."),
		failures:   counter("stampede_relay_failures_total", "Tries to send an event that failed."),
		seconds:    seconds, known: map[string]struct{}{},
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

// of returns the metrics of a target. Each of its series exists from then on.
func (m *metrics) of(name string) *targetMetrics {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.known[name]; !known {
		m.known[name] = struct{}{}
		m.serving.WithLabelValues(name)
	}
	return &targetMetrics{
		deliveries: m.deliveries.WithLabelValues(name), failures: m.failures.WithLabelValues(name),
		seconds: m.seconds.WithLabelValues(name), held: m.held.WithLabelValues(name),
	}
}

// sent counts a try.
func (m *targetMetrics) sent(took time.Duration, err error) {
	m.seconds.Observe(took.Seconds())
	if err != nil {
		m.failures.Inc()
		return
	}
	m.deliveries.Inc()
}

// update shows where all targets stand, and forgets those that are removed.
func (m *metrics) update(all []target.Standing, now time.Time) {
	present := make(map[string]struct{}, len(all))
	for i := range all {
		t := &all[i]
		present[t.Name] = struct{}{}
		m.of(t.Name)
		m.lagEvents.WithLabelValues(t.Name).Set(float64(t.Lag()))
		m.lagSeconds.WithLabelValues(t.Name).Set(t.Waiting(now).Seconds())
		m.failing.WithLabelValues(t.Name).Set(float64(t.Failures))
		for _, state := range []target.State{target.Active, target.Paused, target.Disabled} {
			is := 0.0
			if t.State == state {
				is = 1
			}
			m.state.WithLabelValues(t.Name, string(state)).Set(is)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.known {
		if _, found := present[name]; found {
			continue
		}
		delete(m.known, name)
		for _, vec := range []interface{ DeletePartialMatch(prometheus.Labels) int }{
			m.lagEvents, m.lagSeconds, m.failing, m.state, m.serving, m.held, m.deliveries, m.failures, m.seconds,
		} {
			vec.DeletePartialMatch(prometheus.Labels{labelTarget: name})
		}
	}
}

// stop notes that this process does not serve the target any more.
func (m *metrics) stop(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.known[name]; !known {
		return // it was removed
	}
	m.serving.WithLabelValues(name).Set(0)
	m.held.WithLabelValues(name).Set(0)
}
