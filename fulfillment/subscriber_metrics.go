package fulfillment

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// subscriberMetrics are shared by all subscribers that have the same Registerer.
type subscriberMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost *prometheus.CounterVec

	inFlight *prometheus.GaugeVec
}

// streamMetrics are those of one stream.
type streamMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost prometheus.Counter

	inFlight prometheus.Gauge
}

func newSubscriberMetrics(reg prometheus.Registerer) (*subscriberMetrics, error) {
	var failed []error
	counter := func(name, help string) *prometheus.CounterVec {
		c, err := registerOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"stream"}))
		failed = append(failed, err)
		return c
	}
	m := &subscriberMetrics{
		acked:        counter("stampede_entries_acked_total", "Stream entries acknowledged in Redis."),
		redelivered:  counter("stampede_entries_redelivered_total", "Messages delivered again after their handler had refused them."),
		claimed:      counter("stampede_entries_claimed_total", "Stream entries taken over from consumers that had gone silent."),
		taken:        counter("stampede_entries_taken_total", "Stream entries that another consumer took over while they were held here."),
		deadLettered: counter("stampede_entries_dead_lettered_total", "Stream entries stored as dead letters."),
		lost:         counter("stampede_entries_lost_total", "Stream entries that were trimmed or deleted before anybody had handled them."),
	}
	gauge, err := registerOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_entries_in_flight", Help: "Stream entries held by this process: read, and not yet acknowledged in Redis.",
	}, []string{"stream"}))
	m.inFlight = gauge
	if err := errors.Join(append(failed, err)...); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

func (m *subscriberMetrics) of(stream string) *streamMetrics {
	return &streamMetrics{
		acked:        m.acked.WithLabelValues(stream),
		redelivered:  m.redelivered.WithLabelValues(stream),
		claimed:      m.claimed.WithLabelValues(stream),
		taken:        m.taken.WithLabelValues(stream),
		deadLettered: m.deadLettered.WithLabelValues(stream),
		lost:         m.lost.WithLabelValues(stream),
		inFlight:     m.inFlight.WithLabelValues(stream),
	}
}

// registerOnce registers a collector and returns it, or the equal one that was registered before: a
// process may have several subscribers. Without a Registerer it only returns the collector.
func registerOnce[C prometheus.Collector](reg prometheus.Registerer, collector C) (C, error) {
	if reg == nil {
		return collector, nil
	}
	err := reg.Register(collector)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if existing, ok := already.ExistingCollector.(C); ok {
			return existing, nil
		}
	}
	return collector, err
}
