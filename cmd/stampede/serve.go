package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/ingress"
	"stampede/internal/accept"
	"stampede/internal/connect"
	"stampede/internal/telemetry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// limitFlags limit the load of an ingress.
type limitFlags struct {
	MaxInFlight  int           `default:"4096" placeholder:"N" help:"Requests processed at the same time; more get 503 (${default}). An eighth is reserved for payments and reads of orders, an eighth for reads of sales, a sixteenth for operators, a sixty-fourth for operators who look at orders."`
	DrainTimeout time.Duration `default:"10s" placeholder:"DURATION" help:"How long a stopping ingress or worker may take to finish accepted work (${default})."`
}

func (f limitFlags) Validate() error {
	return cmp.Or(
		wantAtLeast("--max-in-flight", f.MaxInFlight, 1),
		wantAtLeast("--drain-timeout", f.DrainTimeout, time.Millisecond),
	)
}

// receiptFlag is the secret that signs the receipts of accepted orders.
type receiptFlag struct {
	ReceiptSecret string `placeholder:"SECRET" help:"Secret that signs the receipts of orders, at least 32 bytes, the same for all ingresses (default: the one in Postgres; until it is read, purchases are refused)."`
}

func (f receiptFlag) Validate() error {
	return checkFlag(f.ReceiptSecret == "" || len(f.ReceiptSecret) >= order.MinReceiptSecretBytes,
		"--receipt-secret", fmt.Sprintf("%d bytes long", len(f.ReceiptSecret)),
		fmt.Sprintf("at least %d", order.MinReceiptSecretBytes))
}

// replicaFlag makes reservations wait for replicas.
type replicaFlag struct {
	ReplicaAcks int `default:"0" placeholder:"N" help:"Replicas of Redis that must confirm a reservation within 50 ms; its outcome is unknown otherwise, and the buyer retries (${default})."`
}

func (f replicaFlag) storeOptions(logger *slog.Logger) reservation.StoreOptions {
	return reservation.StoreOptions{ReplicaAcks: f.ReplicaAcks, Logger: logger}
}

func (f replicaFlag) Validate() error { return wantAtLeast("--replica-acks", f.ReplicaAcks, 0) }

type serveCmd struct {
	redisFlag
	databaseFlag
	keysFlags
	limitFlags
	clientFlags
	browserFlags
	tokenFlags
	receiptFlag
	replicaFlag
	traceFlag
	profileFlag
	optionalMetricsAddr
	HTTPAddr      string `name:"http-addr" env:"STAMPEDE_HTTP_ADDR" default:":8080" placeholder:"HOST:PORT" help:"Address to listen on (${default})."`
	Auth          string `default:"jwt" enum:"jwt,header" placeholder:"MODE" help:"How buyers are identified: jwt, or header behind a gateway that sets it (${default})."`
	AuthHeader    string `default:"${user_header}" placeholder:"NAME" help:"Header that names the buyer with --auth=header (${default})."`
	AdminToken    string `placeholder:"TOKEN" help:"Bearer token of the operator admin, who may do everything; without it and without --operators-file operators' calls are refused."`
	OperatorsFile string `placeholder:"FILE" help:"Further operators, one a line: name, role (viewer, operator or admin), SHA-256 of the token in hex. Changes are in force within ten seconds."`

	PlainReader string `default:"on" enum:"on,off" placeholder:"MODE" help:"Read plain purchases in front of net/http, for about half of its CPU time: on or off (${default})."`

	StopDelay time.Duration `default:"5s" placeholder:"DURATION" help:"How long a stopping ingress reports not ready but still serves, so that load balancers and clients can move away (${default})."`
}

// Validate is called by kong.
func (c *serveCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.limitFlags.Validate(), c.clientFlags.Validate(), c.receiptFlag.Validate(),
		c.replicaFlag.Validate(), c.traceFlag.Validate(), c.profileFlag.check(c.MetricsAddr),
		wantHeader("--auth-header", c.AuthHeader),
		wantAtLeast("--stop-delay", c.StopDelay, 0))
}

func (c *serveCmd) Run(ctx context.Context, logger *slog.Logger) error {
	collectLess()
	uuid.EnableRandPool() // reads the random bytes of 16 order ids together
	registry := telemetry.NewRegistry()
	tracer, err := c.tracer(ctx, "stampede-ingress", registry, logger)
	if err != nil {
		return err
	}
	defer tracer.Close()
	f, err := openIngressBackend(ctx, c.RedisURL, c.DatabaseURL, c.keysFlags, c.storeOptions(logger), registry, tracer)
	if err != nil {
		return err
	}
	defer f.Close()
	config := ingressConfig(f, c.RedisURL, c.keysFlags, c.limitFlags, c.receiptFlag, registry, logger)
	config.Tracer = tracer
	outcomes, err := f.serveOrders(&config, c.keysFlags)
	if err != nil {
		return err
	}
	config.StopDelay, config.PlainReader = c.StopDelay, c.PlainReader == "on"
	c.bound(&config)
	config.MaxConnections = maxConnections(ingressFiles)
	config.Auth, config.AuthHeader = ingress.AuthMode(c.Auth), c.AuthHeader
	config.AdminToken, config.OperatorsFile = c.AdminToken, c.OperatorsFile
	config.CORSOrigins = c.CORSOrigins
	c.verifyBy(&config)
	if err := config.Validate(); err != nil {
		return &usageError{err}
	}
	if err := checkSchema(ctx, f.pool, logger); err != nil {
		return err
	}
	warnOfSettings(ctx, f.backend, reservation.IngressRights, logger)
	// Listen here, so that the port is known for an address with port 0.
	if config.Listener, err = accept.Listen(ctx, c.HTTPAddr); err != nil {
		return listenError(err, "STAMPEDE_HTTP_ADDR", "--http-addr")
	}
	server, err := ingress.New(config)
	if err != nil {
		_ = config.Listener.Close()
		return err
	}
	logger.Info("ingress listens", "addr", config.Listener.Addr().String(), "auth", c.Auth, "connections_max",
		config.MaxConnections)
	together, ctx := errgroup.WithContext(ctx)
	// A stopping ingress is still watched.
	watched, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	together.Go(func() error {
		defer stopWatching()
		return runIngress(ctx, server, outcomes, f.guard(logger))
	})
	together.Go(func() error { return f.heartbeat(logger).Run(ctx) })
	if c.MetricsAddr != "" {
		together.Go(func() error { return c.serve(watched, c.MetricsAddr, registry, server.Ready) })
	}
	return together.Wait()
}

func ingressConfig(
	f *ingressBackend, redisURL string, keys keysFlags, limits limitFlags, receipt receiptFlag,
	registry *prometheus.Registry, logger *slog.Logger,
) ingress.Config {
	return ingress.Config{
		Reservations:  f.store,
		Sales:         f.catalog,
		ReceiptSecret: receipt.ReceiptSecret,
		// A read blocks, so its client must not be shared.
		Outcomes:        func() (redis.UniversalClient, error) { return connect.Blocking(redisURL) },
		OutcomesStreams: keys.keys().AllOutcomes(),
		MaxInFlight:     limits.MaxInFlight,
		DrainTimeout:    limits.DrainTimeout,
		PlainReader:     true,
		Metrics:         registry,
		Logger:          logger,
	}
}

// runIngress serves until ctx is done and the last request is answered. The feed of outcomes and the guard end after
// the server, because a stopping server still changes orders and sells.
func runIngress(
	ctx context.Context, server *ingress.Server, outcomes *ledger.Outcomes, guard reservation.Guard,
) error {
	besideCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	beside.Go(func() { outcomes.Run(besideCtx) })
	beside.Go(func() { _ = guard.Run(besideCtx) }) // always nil
	defer beside.Wait()
	defer stop()
	return server.Run(ctx)
}
