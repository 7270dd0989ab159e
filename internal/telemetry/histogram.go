package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// nativeFactor is how much wider a bucket of a native histogram is than the one below it, at most.
	nativeFactor = 1.1
	// nativeBucketsMax bounds the buckets of a series. Beyond it, neighbours are merged or, after nativeReset, dropped.
	nativeBucketsMax = 160
	nativeReset      = time.Hour
)

// Native returns the options with a native histogram beside the classic buckets. A server that asks for protobuf gets
// both, others only the classic ones.
func Native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor = nativeFactor
	o.NativeHistogramMaxBucketNumber = nativeBucketsMax
	o.NativeHistogramMinResetDuration = nativeReset
	return o
}

// OrdersByOutcome returns stampede_orders_total, with these outcomes. Workers count what they record, and ingresses
// what buyers and operators change; a process may be both.
func OrdersByOutcome(reg prometheus.Registerer, outcomes ...string) (*prometheus.CounterVec, error) {
	counted, err := RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_orders_total",
		Help: "Orders by outcome. Workers count confirmed, rejected, voided and expired ones, and deliveries that were " +
			"duplicate (recorded before) or unusable; ingresses count paid and cancelled ones.",
	}, []string{"outcome"}))
	if err != nil {
		return nil, err
	}
	for _, outcome := range outcomes {
		counted.WithLabelValues(outcome) // it exists before the first event, which increase() would miss otherwise
	}
	return counted, nil
}
