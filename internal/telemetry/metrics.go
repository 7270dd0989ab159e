package telemetry

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// NewRegistry returns a registry that has the metrics of the Go runtime, of the process and of the
// build, and is apart from the global one, so that a test can make as many as it likes.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name:        "stampede_build_info",
			Help:        "Always 1; the labels tell which build this is.",
			ConstLabels: prometheus.Labels{"version": BuildVersion(), "go_version": runtime.Version()},
		}, func() float64 { return 1 }),
	)
	return registry
}
