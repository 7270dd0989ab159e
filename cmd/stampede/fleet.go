package main

import (
	"fmt"
	"log/slog"

	"stampede/dashboard/fleet"
)

// fleetPostgresConns is how many connections a fleet uses: one for the sales, one for the rest, which may be slower.
const fleetPostgresConns = 2

// scrapeFlags name the processes that a fleet watches.
type scrapeFlags struct {
	Scrape []string `env:"STAMPEDE_SCRAPE" placeholder:"URL,…" help:"Metrics of the ingresses, workers and relays to watch, such as http://10.0.0.7:9090/metrics. With dns+http://worker:9090/metrics each address of the name is a process. Without any, only Redis and Postgres are watched."`
}

// fleet returns a fleet that watches the processes and the servers of b.
func (f scrapeFlags) fleet(b *backend, logger *slog.Logger) (*fleet.Fleet, error) {
	watched, err := fleet.New(fleet.Config{
		Pool: b.pool, Catalog: b.catalog, Store: b.store, Targets: f.Scrape, Logger: logger,
	})
	if err != nil {
		return nil, &usageError{fmt.Errorf("--scrape: %w", err)}
	}
	return watched, nil
}
