package telemetry

import (
	"regexp"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// schedulerLatency is how long goroutines wait for a processor: go_sched_latencies_seconds. No latency of a request
// shows it, because a request that waits cannot look at the clock.
var schedulerLatency = collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile(`^/sched/latencies:seconds$`)}

// NewRegistry returns a new registry with the metrics of the Go runtime, the process and the build. It does not use the
// global registry, so that tests can have their own.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(schedulerLatency)),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name:        "stampede_build_info",
			Help:        "Always 1; the labels identify the build.",
			ConstLabels: prometheus.Labels{"version": BuildVersion(), "go_version": runtime.Version()},
		}, func() float64 { return 1 }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "stampede_log_lines_lost_total",
			Help: "Lines of the log that were lost because their reader was too slow or had gone, or the disk was full.",
		}, func() float64 { return float64(linesLost.Load()) }),
	)
	return registry
}
