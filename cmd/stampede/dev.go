package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"stampede/ingress"
	"stampede/internal/accept"
	"stampede/internal/connect"
	"stampede/internal/dev/demo"
	"stampede/internal/dev/loadgen"
	"stampede/internal/dev/localserver"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/sql/migrate"
)

type devCmd struct {
	optionalServers
	keysFlags
	ingressFlags
	workerFlags
	relayFlags
	traceFlag
	profileFlag
	optionalMetricsAddr
	HTTPAddr      string `name:"http-addr" env:"STAMPEDE_HTTP_ADDR" default:"127.0.0.1:8080" type:"addr" placeholder:"HOST:PORT" help:"Address to listen on (${default}). Keep it local: with --auth=header anybody can be any buyer."`
	Auth          string `default:"header" enum:"header,jwt" placeholder:"MODE" help:"How buyers are identified: header or jwt (${default})."`
	AuthHeader    string `default:"${auth_header}" placeholder:"NAME" help:"Header that names the buyer with --auth=header (${default})."`
	AdminToken    string `placeholder:"TOKEN" help:"Bearer token of the operator admin, who may do everything (default: random)."`
	OperatorsFile string `placeholder:"FILE" help:"Further operators, one a line: name, role (viewer, cashier, operator or admin), SHA-256 of the token in hex. Changes are in force within ten seconds."`
	DashboardAddr string `placeholder:"HOST:PORT" help:"Address of the dashboard; off: none (default: 127.0.0.1:8090, or another port if it is in use)."`
}

// noDashboard is the address that dev takes for none.
const noDashboard = "off"

// Validate is called by kong.
func (c *devCmd) Validate() error {
	return cmp.Or(
		c.optionalServers.Validate(), c.keysFlags.Validate(), c.ingressFlags.Validate(), c.workerFlags.Validate(),
		c.relayFlags.Validate(), c.traceFlag.Validate(), c.profileFlag.check(c.MetricsAddr),
		wantHeader("--auth-header", c.AuthHeader), c.checkDashboardAddr(),
	)
}

func (c *devCmd) checkDashboardAddr() error {
	if c.DashboardAddr == noDashboard {
		return nil
	}
	if err := checkAddr(c.DashboardAddr); err != nil {
		return usagef("--dashboard-addr: %w", err)
	}
	return nil
}

func (c *devCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	raiseGOGC()
	if c.Cluster {
		c.Partitions = max(c.Partitions, clusterPartitions)
	}
	servers, err := localserver.Provide(ctx, c.wanted())
	if err != nil {
		return err
	}
	defer servers.Stop()
	if err := migrate.Up(ctx, servers.DatabaseURL); err != nil {
		return err
	}
	consumer, free, err := consumerName(c.Consumer, logger)
	if err != nil {
		return err
	}
	defer free()
	if c.AdminToken == "" {
		c.AdminToken = rand.Text()
	}

	registry := telemetry.NewRegistry()
	tracer, err := c.tracer(ctx, "stampede", registry, logger)
	if err != nil {
		return err
	}
	defer tracer.Close()
	stores := storesFlags{redisFlag{servers.RedisURL}, databaseFlag{servers.DatabaseURL}, c.keysFlags}
	front, err := openIngressBackend(ctx, stores, c.storeOptions(logger), registry, tracer)
	if err != nil {
		return err
	}
	defer front.Close()
	back, err := stores.open(ctx, workerPostgresConns+relayPostgresConns, logger, connect.Service("work"),
		connect.Traced(tracer))
	if err != nil {
		return err
	}
	defer back.Close()
	warnOfSettings(ctx, front.backend, reservation.OperatorRights, logger)

	config := c.config(front, c.Auth, c.AuthHeader, c.AdminToken, c.OperatorsFile, registry, tracer, logger)
	config.StripeTestMode = cmp.Or(config.StripeTestMode, ingress.SwitchOn)
	outcomes, err := front.serveOrders(&config)
	if err != nil {
		return err
	}
	config.MaxConnections = maxConnections(ingressFiles + workerFiles)
	if config.Listener, err = accept.Listen(ctx, c.HTTPAddr); err != nil {
		return listenError(err, "STAMPEDE_HTTP_ADDR", "--http-addr")
	}
	defer func() { _ = config.Listener.Close() }() // without effect once the server has run
	server, err := ingress.New(config)
	if err != nil {
		return &usageError{err}
	}
	defer server.Close()
	runWorker, err := c.worker(back, consumer, c.DrainTimeout, registry, tracer, logger)
	if err != nil {
		return err
	}
	forwarder, err := c.relay(back, 0, s.out, registry, tracer, logger)
	if err != nil {
		return err
	}
	ingressURL := "http://" + config.Listener.Addr().String()
	runDashboard, dashboardURL, closeDashboard, err := c.openDashboard(ctx, stores, ingressURL, logger)
	if err != nil {
		return err
	}
	defer closeDashboard()

	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return servers.Watch(ctx) })
	running.Go(func() error { return runIngress(ctx, server, outcomes, front.guard(logger)) })
	running.Go(func() error { return front.heartbeat(logger).Run(ctx) })
	running.Go(func() error { front.watchClock(ctx); return nil })
	running.Go(func() error { return runWorker(ctx) })
	running.Go(func() error { return forwarder.Run(ctx) })
	running.Go(func() error { return runDashboard(ctx) })
	if c.MetricsAddr != "" {
		running.Go(func() error { return c.serve(ctx, c.MetricsAddr, registry, server.Ready) })
	}
	if err := c.welcome(s.out, ingressURL, dashboardURL, servers); err != nil {
		return err
	}
	return running.Wait()
}

// openDashboard returns the function that runs the dashboard of this process, and its URL.
func (c *devCmd) openDashboard(
	ctx context.Context, stores storesFlags, ingressURL string, logger *slog.Logger,
) (run func(context.Context) error, url string, closeAll func(), err error) {
	if c.DashboardAddr == noDashboard {
		return func(context.Context) error { return nil }, "none", func() {}, nil
	}
	b, err := stores.openDashboard(ctx, logger)
	if err != nil {
		return nil, "", nil, err
	}
	serve, err := newDashboard(b, scrapeFlags{Scrape: []string{ingressURL + "/metrics"}}, operators.Config{
		File: c.OperatorsFile, AdminToken: c.AdminToken, Logger: logger,
	}, c.TrustedProxies, logger)
	var listener net.Listener
	if err == nil {
		listener, err = localDashboard(ctx, c.DashboardAddr)
	}
	if err != nil {
		b.Close()
		return nil, "", nil, err
	}
	run = func(ctx context.Context) error { return serve(ctx, listener) }
	return run, "http://" + listener.Addr().String(), b.Close, nil
}

// welcome prints the addresses, and commands to paste.
func (c *devCmd) welcome(w io.Writer, url, dashboardURL string, servers *localserver.Pair) error {
	kept := "deleted when this ends"
	if c.RedisURL != "" || c.DatabaseURL != "" {
		kept = "deleted when this ends, except on the servers that were given"
	}
	environment := "REDIS_URL=" + quoted(servers.RedisURL) + " DATABASE_URL=" + quoted(servers.DatabaseURL)
	if c.Partitions > 1 {
		environment += " STAMPEDE_PARTITIONS=" + strconv.Itoa(c.Partitions)
	}
	buyer := c.AuthHeader + ": alice"
	if c.Auth == string(ingress.AuthJWT) {
		buyer = "Authorization: Bearer TOKEN"
	}
	_, err := fmt.Fprintf(w, `Stampede is up. All data is %s (Ctrl-C).

  ingress       %s
  dashboard     %[8]s
  redis         %[3]s
  postgres      %[4]s
  admin token   %[5]s

Create a sale of 100 units:

  curl -s %[2]s/v1/sales -H 'Authorization: Bearer %[5]s' \
    -H 'Content-Type: application/json' -d '{"name":"first sale","stock":100}'

Buy a unit; ID is the id in its answer:

  curl -si %[2]s/v1/sales/ID/orders -H '%[6]s' \
    -H 'Idempotency-Key: first' -H 'Content-Type: application/json' -d '{"quantity":1}'

Run other commands in a second terminal, such as stampede sale list, after

  export %[7]s

`, kept, url, servers.RedisURL, servers.DatabaseURL, c.AdminToken, buyer, environment, dashboardURL)
	return err
}

// quoted is text as one word of a shell.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

type demoCmd struct {
	optionalServers
	outputFlag
	Stock        int64         `env:"STAMPEDE_DEMO_STOCK" default:"10000" placeholder:"UNITS" help:"Units for sale, at least 100 (${default})."`
	Items        []saleItem    `env:"STAMPEDE_DEMO_ITEMS" placeholder:"CODE:STOCK" help:"Items of the sale with their units, in place of --stock; buyers take two at once."`
	Shards       int           `env:"STAMPEDE_DEMO_SHARDS" default:"1" placeholder:"N" help:"Partitions that share the stock (${default})."`
	Buyers       int           `env:"STAMPEDE_DEMO_BUYERS" default:"50000" placeholder:"N" help:"Number of buyers, at least 100 (${default})."`
	Over         time.Duration `env:"STAMPEDE_DEMO_OVER" default:"8s" placeholder:"DURATION" help:"Time over which the buyers arrive, evenly spread (${default})."`
	Dashboard    bool          `env:"STAMPEDE_DEMO_DASHBOARD" help:"Run a dashboard too, and keep everything running after the verdict, until Ctrl-C."`
	DoubleClicks float64       `env:"STAMPEDE_DEMO_DOUBLE_CLICKS" default:"0.05" placeholder:"SHARE" help:"Share of buyers who click twice at the same time, 0 to 1 (${default})."`
}

// Validate is called by kong.
func (c *demoCmd) Validate() error {
	return cmp.Or(
		c.optionalServers.Validate(),
		checkFlag(c.Buyers <= loadgen.MaxBuyers, "--buyers", c.Buyers, fmt.Sprintf("at most %d", loadgen.MaxBuyers)),
		checkFlag(c.Shards >= 1 && c.Shards <= reservation.MaxPartitions, "--shards", c.Shards,
			fmt.Sprintf("1 to %d", reservation.MaxPartitions)),
		wantAtLeast("--over", c.Over, 0),
		wantShare("--double-clicks", c.DoubleClicks),
	)
}

func (c *demoCmd) Run(ctx context.Context, s *streams) error {
	raiseGOGC()
	// Only the demo's own text is printed; its processes write their logs to files.
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	partitions := 1
	if c.Cluster {
		partitions = clusterPartitions
	}
	config := demo.Config{
		Stock: c.Stock, Shards: c.Shards, Buyers: c.Buyers, Over: c.Over, DoubleClicks: c.DoubleClicks,
		Servers: c.wanted(), Partitions: partitions, Dashboard: c.Dashboard, Out: s.out,
	}
	if len(c.Items) > 0 {
		config.Items, config.Stock = itemTerms(c.Items)
	}
	if c.json() {
		config.Out = s.err
		config.Verdict = func(v demo.Verdict) error { return writeJSON(s.out, v) }
	}
	config.Terminal = isTerminal(config.Out)
	err := demo.Run(ctx, config)
	switch {
	case errors.Is(err, demo.ErrBroken):
		return errBroken
	case errors.Is(err, demo.ErrUnchecked):
		return errUnchecked
	}
	return err
}
