package telemetry

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// OneIf is 1 for true and 0 for false, as gauges show it.
func OneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// RegisterOnce registers a collector and returns it, or an equal one that is already registered: a process
// may have several subscribers. Without a Registerer it only returns the collector.
func RegisterOnce[C prometheus.Collector](reg prometheus.Registerer, collector C) (C, error) {
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
