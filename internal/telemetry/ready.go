package telemetry

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
)

// readyInterval is the pause between two looks at whether a process is ready. A scrape asks no server.
const readyInterval = 2 * time.Second

// WatchReady registers the metrics of whether a process is ready, as /readyz says, and of what it depends on. Run looks
// until its context is done; before its first look the series are absent. A
// dependency that a look does not tell of keeps its value.
func WatchReady(
	reg prometheus.Registerer, look func(context.Context) (ready bool, dependencies map[string]bool),
) (run func(context.Context), err error) {
	ready := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_ready", Help: "1 if this process is ready, as /readyz says, else 0.",
	}, nil)
	up := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_dependency_up",
		Help: "1 if this process can use the dependency, and a server takes its writes, else 0. " +
			"An ingress is ready without postgres.",
	}, []string{"dependency"})
	if _, err := RegisterOnce(reg, ready); err != nil {
		return nil, err
	}
	if _, err := RegisterOnce(reg, up); err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		for {
			limited, cancel := context.WithTimeout(ctx, readyTimeout)
			isReady, dependencies := look(limited)
			cancel()
			if ctx.Err() == nil {
				ready.WithLabelValues().Set(number(isReady))
				for name, isUp := range dependencies {
					up.WithLabelValues(name).Set(number(isUp))
				}
			}
			if !retry.Pause(readyInterval, ctx.Done()) {
				return
			}
		}
	}, nil
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
