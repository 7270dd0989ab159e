package relay

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
	"stampede/relay/target"
)

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
