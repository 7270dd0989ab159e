package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"syscall"

	"golang.org/x/sync/errgroup"

	"stampede/dashboard"
	"stampede/dashboard/fleet"
	"stampede/internal/connect"
	"stampede/internal/forwarded"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
)

// dashboardPostgresConns are those of the fleet, three for a reconcile, and those of the pages.
const dashboardPostgresConns = fleetPostgresConns + 6

type dashboardCmd struct {
	storesFlags
	scrapeFlags
	Addr           string            `env:"STAMPEDE_DASHBOARD_ADDR" default:"127.0.0.1:8090" type:"addr" placeholder:"HOST:PORT" help:"Address to listen on (${default}). Behind a proxy with TLS only."`
	AdminToken     string            `placeholder:"TOKEN" help:"Token of the operator admin, who may do everything; without it and without --operators-file nobody can log in."`
	OperatorsFile  string            `placeholder:"FILE" help:"Further operators, one a line: name, role (viewer, cashier, operator or admin), SHA-256 of the token in hex. Changes are in force within ten seconds, and end the sessions of who lost a role."`
	TrustedProxies forwarded.Proxies `placeholder:"PREFIXES" help:"Proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted, such as 10.0.0.0/8,192.0.2.1."`
}

// Validate is called by kong.
func (c *dashboardCmd) Validate() error { return c.keysFlags.Validate() }

func (c *dashboardCmd) Run(ctx context.Context, logger *slog.Logger) error {
	b, err := c.openDashboard(ctx, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := checkSchema(ctx, b.pool, logger); err != nil {
		return err
	}
	run, err := newDashboard(b, c.scrapeFlags, operators.Config{
		File: c.OperatorsFile, AdminToken: c.AdminToken, Logger: logger,
	}, c.TrustedProxies, logger)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Addr)
	if err != nil {
		return listenError(err, "STAMPEDE_DASHBOARD_ADDR", "--addr")
	}
	logger.Info("dashboard listens", "addr", listener.Addr().String(), "watches", len(c.Scrape))
	return run(ctx, listener)
}

func (f storesFlags) openDashboard(ctx context.Context, logger *slog.Logger) (*backend, error) {
	return f.open(ctx, dashboardPostgresConns, logger, connect.Named("dashboard"))
}

// newDashboard returns the function that runs a dashboard, with its fleet and its operators, until its context ends.
func newDashboard(
	b *backend, watched scrapeFlags, who operators.Config, trusted forwarded.Proxies, logger *slog.Logger,
) (run func(context.Context, net.Listener) error, err error) {
	metrics := telemetry.NewRegistry()
	who.Registerer = metrics
	registry, err := operators.New(who)
	if err != nil {
		return nil, err
	}
	seen, err := watched.fleet(b, logger)
	if err != nil {
		return nil, err
	}
	pages, err := dashboard.New(dashboard.Config{
		Fleet: seen, Pool: b.pool, Redis: b.redis, Keys: b.keys, Store: b.store, Catalog: b.catalog,
		Operators: registry, TrustedProxies: trusted, Metrics: metrics, Logger: logger,
	})
	if err != nil {
		return nil, err
	}
	watchClock, err := watchClock(metrics, b.pool)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, listener net.Listener) error {
		running, ctx := errgroup.WithContext(ctx)
		running.Go(func() error { watchClock(ctx); return nil })
		running.Go(func() error { registry.Run(ctx); return nil })
		running.Go(func() error { return seen.Run(ctx) })
		running.Go(func() error { return pages.Serve(ctx, listener) })
		return running.Wait()
	}, nil
}

// localDashboard listens for the dashboard of stampede dev: on the address, or without one on the usual port, or
// another if that is in use.
func localDashboard(ctx context.Context, addr string) (net.Listener, error) {
	const usual, free = "127.0.0.1:8090", "127.0.0.1:0"
	var config net.ListenConfig
	if addr != "" {
		listener, err := config.Listen(ctx, "tcp", addr)
		return listener, listenError(err, "STAMPEDE_DASHBOARD_ADDR", "--dashboard-addr")
	}
	listener, err := config.Listen(ctx, "tcp", usual)
	if errors.Is(err, syscall.EADDRINUSE) {
		listener, err = config.Listen(ctx, "tcp", free)
	}
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	return listener, nil
}

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
