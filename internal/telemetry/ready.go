package telemetry

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/retry"
)

// readyInterval is the pause between two looks at whether a process is ready. A scrape asks no server.
const readyInterval = time.Second

// WatchReady registers the metrics of whether a process, such as ingress, is ready, and of what it depends on.
//
// run looks until its context is done; before its first look the series are absent. look returns why the process is not
// ready, "" if it is; a dependency that it leaves out keeps its value.
func WatchReady(
	reg prometheus.Registerer, process string,
	look func(context.Context) (notReady string, dependencies map[string]bool),
) (run func(context.Context), err error) {
	ready, err := RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_ready", Help: "1 if this process is ready, as /readyz says; else 0, and why not.",
	}, []string{"process", "reason"}))
	if err != nil {
		return nil, err
	}
	up, err := RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_dependency_up",
		Help: "1 if this process can use the dependency, and a server takes its writes, else 0. " +
			"An ingress is ready without postgres.",
	}, []string{"dependency"}))
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		shown := ""
		for {
			limited, cancel := context.WithTimeout(ctx, readyTimeout)
			notReady, dependencies := look(limited)
			cancel()
			if ctx.Err() == nil {
				ready.WithLabelValues(process, notReady).Set(OneIf(notReady == ""))
				if notReady != shown { // only now, so that no scrape finds nothing
					ready.DeleteLabelValues(process, shown)
					shown = notReady
				}
				for name, isUp := range dependencies {
					up.WithLabelValues(name).Set(OneIf(isUp))
				}
			}
			if !retry.Pause(readyInterval, ctx.Done()) {
				return
			}
		}
	}, nil
}
