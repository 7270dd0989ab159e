package stream

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
)

// subscriberMetrics are shared by all subscribers with the same Registerer.
type subscriberMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost *prometheus.CounterVec

	inFlight *prometheus.GaugeVec
}

// streamMetrics are the metrics of one stream.
type streamMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost prometheus.Counter

	inFlight prometheus.Gauge
}

func newSubscriberMetrics(reg prometheus.Registerer) (*subscriberMetrics, error) {
	var failed []error
	counter := func(name, help string) *prometheus.CounterVec {
		c, err := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help},
			[]string{"stream"}))
		failed = append(failed, err)
		return c
	}
	m := &subscriberMetrics{
		acked: counter("stampede_entries_acked_total", "Stream entries acknowledged in Redis."),
		redelivered: counter("stampede_entries_redelivered_total",
			"Messages delivered again after their handler had refused them."),
		claimed: counter("stampede_entries_claimed_total",
			"Stream entries claimed from silent consumers."),
		taken: counter("stampede_entries_taken_total",
			"Stream entries that another consumer took over while they were held here."),
		deadLettered: counter("stampede_entries_dead_lettered_total", "Stream entries stored as dead letters."),
		lost: counter("stampede_entries_lost_total",
			"Stream entries that were trimmed or deleted before they were handled."),
	}
	gauge, err := telemetry.RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_entries_in_flight",
		Help: "Stream entries held by this process: read, and not yet acknowledged in Redis.",
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
