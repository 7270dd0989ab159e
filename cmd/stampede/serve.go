package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment/ledger"
	"stampede/ingress"
	"stampede/internal/accept"
	"stampede/internal/connect"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/reservation/order"
)

// limitFlags bound what an ingress takes on.
type limitFlags struct {
	MaxInFlight  int           `default:"4096" placeholder:"N" help:"Requests worked on at once; more are answered 503 (${default}). An eighth is kept for payments and looks at orders, an eighth for looks at sales, a sixteenth for operators."`
	DrainTimeout time.Duration `default:"10s" placeholder:"DURATION" help:"How long a stopping ingress or worker may take to finish what it has accepted (${default})."`
}

func (f limitFlags) Validate() error {
	return cmp.Or(
		wantAtLeast("--max-in-flight", f.MaxInFlight, 1),
		wantAtLeast("--drain-timeout", f.DrainTimeout, time.Millisecond),
	)
}

// receiptFlag is the secret for the receipts of accepted orders.
type receiptFlag struct {
	ReceiptSecret string `placeholder:"SECRET" help:"Secret with which orders' receipts are signed, at least 32 bytes, the same for all ingresses; that in Postgres if left out, without which no purchase is accepted."`
}

func (f receiptFlag) Validate() error {
	return want(f.ReceiptSecret == "" || len(f.ReceiptSecret) >= order.MinReceiptSecretBytes,
		"--receipt-secret", fmt.Sprintf("%d bytes long", len(f.ReceiptSecret)),
		fmt.Sprintf("at least %d", order.MinReceiptSecretBytes))
}

type serveCmd struct {
	redisFlag
	databaseFlag
	keysFlags
	limitFlags
	clientFlags
	receiptFlag
	HTTPAddr    string `name:"http-addr" env:"STAMPEDE_HTTP_ADDR" default:":8080" placeholder:"HOST:PORT" help:"Where to listen (${default})."`
	Auth        string `default:"jwt" enum:"jwt,header" placeholder:"MODE" help:"How buyers say who they are: jwt, or header behind a gateway that sets it (${default})."`
	AuthHeader  string `default:"X-User-ID" placeholder:"NAME" help:"Header that names the buyer where --auth is header (${default})."`
	AdminToken  string `placeholder:"TOKEN" help:"Bearer token of the operators; without it their calls are refused."`
	JWTSecret   string `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret of the buyers' HS256 tokens, at least 32 bytes."`
	JWKSURL     string `name:"jwks-url" env:"STAMPEDE_JWKS_URL" placeholder:"URL" help:"Key set of the buyers' tokens, instead of a secret."`
	JWTIssuer   string `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer that the tokens must name; any if left out."`
	JWTAudience string `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience that the tokens must name; any if left out."`

	StopDelay time.Duration `default:"5s" placeholder:"DURATION" help:"How long a stopping ingress says that it is not ready and serves all the same, for load balancers and clients to move away (${default})."`
}

// Validate is called by kong.
func (c *serveCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.limitFlags.Validate(), c.clientFlags.Validate(), c.receiptFlag.Validate(),
		wantHeader("--auth-header", c.AuthHeader),
		wantAtLeast("--stop-delay", c.StopDelay, 0))
}

func (c *serveCmd) Run(ctx context.Context, logger *slog.Logger) error {
	collectLess()
	f, err := openFront(ctx, c.RedisURL, c.DatabaseURL, c.keysFlags, logger)
	if err != nil {
		return err
	}
	defer f.Close()
	config := ingressConfig(f, c.RedisURL, c.keysFlags, c.limitFlags, c.receiptFlag, logger)
	outcomes, err := f.serveOrders(&config, c.keysFlags)
	if err != nil {
		return err
	}
	config.StopDelay = c.StopDelay
	c.bound(&config)
	config.MaxConnections = maxConnections(ingressFiles)
	config.Auth, config.AuthHeader, config.AdminToken = ingress.AuthMode(c.Auth), c.AuthHeader, c.AdminToken
	config.JWTSecret, config.JWKSURL = c.JWTSecret, c.JWKSURL
	config.JWTIssuer, config.JWTAudience = c.JWTIssuer, c.JWTAudience
	if err := config.Validate(); err != nil {
		return &usageError{err}
	}
	if err := checkSchema(ctx, f.pool, logger); err != nil {
		return err
	}
	warnOfSettings(ctx, f.backend, logger)
	// Listening here tells the port where :0 was asked for.
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
	together.Go(func() error { return runIngress(ctx, server, outcomes, f.guard(logger)) })
	together.Go(func() error { return f.heartbeat(logger).Run(ctx) })
	return together.Wait()
}

func ingressConfig(
	f *front, redisURL string, keys keysFlags, limits limitFlags, receipt receiptFlag, logger *slog.Logger,
) ingress.Config {
	return ingress.Config{
		Reservations:  f.store,
		Sales:         f.catalog,
		ReceiptSecret: receipt.ReceiptSecret,
		// A read waits for messages, so its client must be nobody else's.
		Outcomes:       func() (redis.UniversalClient, error) { return connect.Blocking(redisURL) },
		OutcomesStream: keys.keys().Outcomes(),
		MaxInFlight:    limits.MaxInFlight,
		DrainTimeout:   limits.DrainTimeout,
		Metrics:        telemetry.NewRegistry(),
		Logger:         logger,
	}
}

// runIngress serves until ctx ends and the last buyer was answered, whose change is told as well. A stopping server
// sells for as long, so the guard ends after it.
func runIngress(
	ctx context.Context, server *ingress.Server, outcomes *ledger.Outcomes, guard reservation.Guard,
) error {
	until, stop := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	beside.Go(func() { outcomes.Run(until) })
	beside.Go(func() { _ = guard.Run(until) }) // which returns nil
	defer beside.Wait()
	defer stop()
	return server.Run(ctx)
}
