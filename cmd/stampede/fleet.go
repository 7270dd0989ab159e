package main

import (
	"log/slog"

	"stampede/dashboard/fleet"
)

// fleetFlags say which processes are watched.
type fleetFlags struct {
	Scrape []string `env:"STAMPEDE_SCRAPE" placeholder:"URL,…" help:"Metrics of the ingresses, workers and relays to watch, such as http://ingress:8080/metrics. With the scheme dns+http each address of the host is a process."`
}

// openFleet returns the fleet of an installation.
func (f fleetFlags) openFleet(b *backend, logger *slog.Logger) (*fleet.Fleet, error) {
	found, err := fleet.New(fleet.Config{
		Pool: b.pool, Catalog: b.catalog, Store: b.store, Targets: f.Scrape, Logger: logger,
	})
	if err != nil {
		return nil, &usageError{err}
	}
	return found, nil
}
