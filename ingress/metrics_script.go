package ingress

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/telemetry"
	"stampede/reservation"
)

// ObserveScripts registers the metrics of the calls of scripts, for the Store of an ingress.
func ObserveScripts(reg *prometheus.Registry) (reservation.Observer, error) {
	seconds := prometheus.NewHistogramVec(telemetry.Native(prometheus.HistogramOpts{
		Name:    "stampede_script_duration_seconds",
		Help:    "Round trip of one try to call a script in Redis, tries without an answer included.",
		Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 3},
	}), []string{"script"})
	orders := prometheus.NewHistogram(telemetry.Native(prometheus.HistogramOpts{
		Name:    "stampede_script_batch_orders",
		Help:    "Purchases that one call of the script reserve decides.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 9),
	}))
	if err := register(reg, seconds, orders); err != nil {
		return reservation.Observer{}, err
	}
	reserve := seconds.WithLabelValues("reserve")
	return reservation.Observer{Reserve: func(requests int, took time.Duration) {
		reserve.Observe(took.Seconds())
		orders.Observe(float64(requests))
	}}, nil
}
