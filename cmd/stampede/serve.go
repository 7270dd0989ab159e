package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment"
	"stampede/ingress"
	"stampede/internal/accept"
	"stampede/internal/connect"
	"stampede/internal/forwarded"
	"stampede/internal/ratelimit"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// limitFlags limit the load of an ingress.
type limitFlags struct {
	MaxInFlight  int           `default:"${max_in_flight}" placeholder:"N" help:"Requests processed at the same time; more get 503 (${default}). Of them, 1/8 serves only payments and reads of orders, 1/8 only reads of sales, 1/16 only changes by operators, and 1/64 only reads by operators; purchases have the rest."`
	DrainTimeout time.Duration `default:"${serve_drain}" placeholder:"DURATION" help:"How long a stopping ingress or worker may take to finish accepted work (${default})."`
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

// ingressFlags are common to serve and dev.
type ingressFlags struct {
	limitFlags
	clientFlags
	browserFlags
	tokenFlags
	receiptFlag
	replicaFlag
	paymentFlags
}

func (f ingressFlags) Validate() error {
	return cmp.Or(f.limitFlags.Validate(), f.clientFlags.Validate(), f.receiptFlag.Validate(), f.replicaFlag.Validate())
}

// config is that of an ingress on the servers of b, for the buyers and operators who are given.
func (f ingressFlags) config(
	b *ingressBackend, auth, authHeader, adminToken, operatorsFile string, registry *prometheus.Registry,
	tracer *tracing.Tracer, logger *slog.Logger,
) ingress.Config {
	config := ingress.Config{
		Reservations:    b.store,
		Sales:           b.catalog,
		ReceiptSecret:   f.ReceiptSecret,
		Outcomes:        func() (redis.UniversalClient, error) { return connect.Blocking(b.redisURL) },
		OutcomesStreams: b.keys.AllOutcomes(),
		MaxInFlight:     f.MaxInFlight,
		DrainTimeout:    f.DrainTimeout,
		PlainReader:     true,
		Auth:            ingress.AuthMode(auth),
		AuthHeader:      authHeader,
		AdminToken:      adminToken,
		OperatorsFile:   operatorsFile,
		CORSOrigins:     f.CORSOrigins,
		Metrics:         registry,
		Tracer:          tracer,
		Logger:          logger,
	}
	f.bound(&config)
	f.verifyBy(&config)
	config.BuyerPay, config.StripeSecretsFile = ingress.Switch(f.BuyerPay), f.StripeSecretsFile
	config.StripeTestMode, config.StripeMetadata = ingress.Switch(f.StripeTestMode), f.StripeMetadata
	return config
}

type serveCmd struct {
	storesFlags
	ingressFlags
	traceFlag
	profileFlag
	optionalMetricsAddr
	HTTPAddr      string `name:"http-addr" env:"STAMPEDE_HTTP_ADDR" default:"${http_addr}" type:"addr" placeholder:"HOST:PORT" help:"Address to listen on (${default})."`
	Auth          string `default:"jwt" enum:"jwt,header" placeholder:"MODE" help:"How buyers are identified: jwt, or header behind a gateway that sets it (${default})."`
	AuthHeader    string `default:"${auth_header}" placeholder:"NAME" help:"Header that names the buyer with --auth=header (${default})."`
	AdminToken    string `placeholder:"TOKEN" help:"Bearer token of the operator admin, who may do everything; without it and without --operators-file operators' calls are refused."`
	OperatorsFile string `placeholder:"FILE" help:"Further operators, one a line: name, role (viewer, cashier, operator or admin), SHA-256 of the token in hex. Changes are in force within ten seconds."`

	PlainReader string `default:"on" enum:"on,off" placeholder:"MODE" help:"Read plain purchases in front of net/http, for about half of its CPU time: on or off (${default})."`

	StopDelay time.Duration `default:"5s" placeholder:"DURATION" help:"How long a stopping ingress reports not ready but still serves, so that load balancers and clients can move away (${default})."`
}

// Validate is called by kong.
func (c *serveCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.ingressFlags.Validate(), c.traceFlag.Validate(),
		c.profileFlag.check(c.MetricsAddr), wantHeader("--auth-header", c.AuthHeader),
		wantAtLeast("--stop-delay", c.StopDelay, 0))
}

func (c *serveCmd) Run(ctx context.Context, logger *slog.Logger) error {
	raiseGOGC()
	uuid.EnableRandPool() // reads the random bytes of 16 order ids together
	registry := telemetry.NewRegistry()
	tracer, err := c.tracer(ctx, "stampede-ingress", registry, logger)
	if err != nil {
		return err
	}
	defer tracer.Close()
	f, err := openIngressBackend(ctx, c.storesFlags, c.storeOptions(logger), registry, tracer)
	if err != nil {
		return err
	}
	defer f.Close()
	config := c.config(f, c.Auth, c.AuthHeader, c.AdminToken, c.OperatorsFile, registry, tracer, logger)
	outcomes, err := f.serveOrders(&config)
	if err != nil {
		return err
	}
	config.StopDelay, config.PlainReader = c.StopDelay, c.PlainReader == "on"
	config.MaxConnections = maxConnections(ingressFiles)
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
	running, ctx := errgroup.WithContext(ctx)
	// A stopping ingress is still watched.
	watched, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	running.Go(func() error {
		defer stopWatching()
		return runIngress(ctx, server, outcomes, f.guard(logger))
	})
	running.Go(func() error { return f.heartbeat(logger).Run(ctx) })
	running.Go(func() error { f.watchClock(ctx); return nil })
	if c.MetricsAddr != "" {
		running.Go(func() error { return c.serve(watched, c.MetricsAddr, registry, server.Ready) })
	}
	return running.Wait()
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

// clientFlags limit what each client may use of an ingress.
type clientFlags struct {
	UserRate       ratelimit.Rate    `default:"5/s" placeholder:"N/s" help:"Purchases that a user may make, and as many requests that pay, cancel or read orders; more get 429; 0: no limit (${default})."`
	UserBurst      int               `default:"20" placeholder:"N" help:"How many of these may come in one burst (${default})."`
	AddressRate    ratelimit.Rate    `default:"0" placeholder:"N/s" help:"The same limits for a client address, checked before authentication, and as many for all other calls together. Offices and mobile networks share addresses; 0: no limit (${default})."`
	AddressBurst   int               `default:"200" placeholder:"N" help:"How many of these may come in one burst (${default})."`
	UserStreams    int               `default:"16" placeholder:"N" help:"Streams of orders that a user may have open at the same time; 0: no limit (${default})."`
	AddressStreams int               `default:"1000" placeholder:"N" help:"Streams of orders, and as many of sales, that a client address may have open at the same time, at most a quarter of all streams; 0: no limit (${default})."`
	TrustedProxies forwarded.Proxies `placeholder:"PREFIXES" help:"Proxies whose X-Forwarded-For is trusted, such as 10.0.0.0/8,192.0.2.1. Without it the client address is that of the connection."`
}

func (f clientFlags) Validate() error {
	return cmp.Or(
		wantBurst("--user-burst", f.UserBurst),
		wantBurst("--address-burst", f.AddressBurst),
		wantAtLeast("--user-streams", f.UserStreams, 0),
		wantAtLeast("--address-streams", f.AddressStreams, 0),
	)
}

func wantBurst(flag string, n int) error {
	return checkFlag(n >= 1 && n <= ratelimit.MaxBurst, flag, n, fmt.Sprintf("1 to %d", ratelimit.MaxBurst))
}

func (f clientFlags) bound(config *ingress.Config) {
	config.UserLimit = ingress.Limit{Rate: f.UserRate, Burst: f.UserBurst}
	config.AddressLimit = ingress.Limit{Rate: f.AddressRate, Burst: f.AddressBurst}
	config.UserStreams, config.AddressStreams = f.UserStreams, f.AddressStreams
	config.TrustedProxies = f.TrustedProxies
}

// browserFlags open an ingress to the pages of other origins.
type browserFlags struct {
	CORSOrigins origins `name:"cors-origins" env:"STAMPEDE_CORS_ORIGINS" placeholder:"ORIGINS" help:"Origins whose pages may make buyers' calls, such as https://shop.example,http://localhost:3000; * allows all (default: none)."`
}

// tokenFlags say how the tokens of buyers are verified.
type tokenFlags struct {
	JWTSecret   string `name:"jwt-secret" env:"STAMPEDE_JWT_SECRET" placeholder:"SECRET" help:"Secret of the buyers' HS256 tokens, at least 32 bytes."`
	JWKSURL     string `name:"jwks-url" env:"STAMPEDE_JWKS_URL" placeholder:"URL" help:"Key set for the buyers' tokens, instead of a secret."`
	JWTIssuer   string `name:"jwt-issuer" env:"STAMPEDE_JWT_ISSUER" placeholder:"ISS" help:"Issuer that tokens must name (default: any)."`
	JWTAudience string `name:"jwt-audience" env:"STAMPEDE_JWT_AUDIENCE" placeholder:"AUD" help:"Audience that tokens must name (default: any)."`
}

func (f tokenFlags) verifyBy(config *ingress.Config) {
	config.JWTSecret, config.JWKSURL = f.JWTSecret, f.JWKSURL
	config.JWTIssuer, config.JWTAudience = f.JWTIssuer, f.JWTAudience
}

// paymentFlags say who reports payments, beside operators.
type paymentFlags struct {
	BuyerPay          string `placeholder:"MODE" help:"Whether buyers report payments of their own orders (POST /v1/orders/{order}/pay), for demos and for gateways that keep the path to themselves: on or off (default: off with --auth=jwt, on with --auth=header)."`
	StripeSecretsFile string `placeholder:"FILE" help:"Secrets that sign Stripe's events at /v1/payments/stripe, one a line. Changes are in force at once. Without it the path is 404."`
	StripeTestMode    string `placeholder:"MODE" help:"Whether payments that were made in a test mode of Stripe pay orders: on or off (default: off, and on with stampede dev). Platforms with Connect get them at their live endpoint."`
	StripeMetadata    string `default:"order_id" placeholder:"NAME" help:"Name under which the metadata of a payment at Stripe have the id of the order (${default}). Choose one that nothing else on the account uses: payments without it are ignored."`
}

// origins are the value of a flag.
type origins []string

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *origins) UnmarshalText(text []byte) (err error) {
	*o, err = ingress.ParseOrigins(string(text))
	return err
}

// workerPostgresConns is enough for two batches in each of a few partitions, and the rest.
const workerPostgresConns = 8

// workerFlags are common to work and dev.
type workerFlags struct {
	Consumer      string        `placeholder:"NAME" help:"Name of this worker, unique and stable across restarts (default: host name and lane)."`
	BatchMax      int           `default:"${batch_max}" placeholder:"ORDERS" help:"Most orders per transaction (${default})."`
	MinIdle       time.Duration `default:"${min_idle}" placeholder:"DURATION" help:"How long another worker may be inactive on an order before this one takes it over; a lost worker is replaced within half of it; the same for all workers (${default})."`
	MaxDeliveries int64         `default:"5" placeholder:"N" help:"Deliveries of a failing entry before it becomes a dead letter (${default})."`
	RetireAfter   time.Duration `default:"1h" placeholder:"DURATION" help:"How long after its end a sale leaves Redis, once all of its orders are final; 0s: never (${default})."`
}

// shortestIdle is the minimum of fulfillment, whose timers are fractions of it.
const shortestIdle = 4 * time.Millisecond

func (f workerFlags) Validate() error {
	return cmp.Or(
		wantAtLeast("--batch-max", f.BatchMax, 1),
		wantAtLeast("--min-idle", f.MinIdle, shortestIdle),
		wantAtLeast("--max-deliveries", f.MaxDeliveries, 1),
		wantAtLeast("--retire-after", f.RetireAfter, 0),
	)
}

type workCmd struct {
	storesFlags
	workerFlags
	profileFlag
	DrainTimeout time.Duration `default:"${work_drain}" placeholder:"DURATION" help:"How long a stopping worker may take to finish started work (${default})."`
	MetricsAddr  string        `default:":9090" type:"addr" placeholder:"HOST:PORT" help:"Address for /metrics, /livez and /readyz (${default})."`
}

// Validate is called by kong.
func (c *workCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.workerFlags.Validate(), c.profileFlag.check(c.MetricsAddr),
		wantAtLeast("--drain-timeout", c.DrainTimeout, time.Millisecond))
}

func (c *workCmd) Run(ctx context.Context, logger *slog.Logger) error {
	raiseGOGC()
	consumer, free, err := consumerName(c.Consumer, logger)
	if err != nil {
		return err
	}
	defer free()
	registry := telemetry.NewRegistry()
	tracer, err := traceFlag{}.tracer(ctx, "stampede-worker", registry, logger)
	if err != nil {
		return err
	}
	defer tracer.Close()
	b, err := c.open(ctx, workerPostgresConns, logger,
		connect.Service("work"), connect.Traced(tracer))
	if err != nil {
		return err
	}
	defer b.Close()
	if err := checkSchema(ctx, b.pool, logger); err != nil {
		return err
	}
	warnOfSettings(ctx, b, reservation.WorkerRights, logger)
	// Create the worker before serving /metrics: it registers the series.
	runWorker, err := c.worker(b, consumer, c.DrainTimeout, registry, tracer, logger)
	if err != nil {
		return err
	}

	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return c.serveStores(ctx, "worker", c.MetricsAddr, registry, b) })
	running.Go(func() error { return runWorker(ctx) })
	return running.Wait()
}

// worker returns the function that runs a worker on the stores of b until its context is done.
func (f workerFlags) worker(
	b *backend, consumer string, drain time.Duration, registry prometheus.Registerer, tracer *tracing.Tracer,
	logger *slog.Logger,
) (run func(context.Context) error, err error) {
	blocking, err := connect.Blocking(b.redisURL)
	if err != nil {
		return nil, err
	}
	pools := connect.NewPools("worker")
	pools.Redis("control", b.redis)
	pools.Redis("reads", blocking)
	pools.Postgres("worker", b.pool)
	if err := pools.Register(registry); err != nil {
		_ = blocking.Close()
		return nil, err
	}
	worker, err := fulfillment.NewWorker(fulfillment.WorkerConfig{
		Blocking: blocking, Catalog: b.catalog,
		Consumer: consumer, BatchMax: f.BatchMax, MinIdle: f.MinIdle, MaxDeliveries: f.MaxDeliveries,
		RetireAfter: f.RetireAfter, DrainTimeout: drain, Logger: logger, Registerer: registry, Tracer: tracer,
	})
	if err != nil {
		_ = blocking.Close()
		return nil, &usageError{err}
	}
	return func(ctx context.Context) error {
		defer func() { _ = blocking.Close() }()
		return worker.Run(ctx)
	}, nil
}

type healthcheckCmd struct {
	readOnly
	outputFlag
	URL     string        `name:"url" env:"STAMPEDE_HEALTHCHECK_URL" default:"http://127.0.0.1:8080/readyz" placeholder:"URL" help:"URL to request (${default}); for a worker, /readyz at its metrics address."`
	Timeout time.Duration `env:"STAMPEDE_HEALTHCHECK_TIMEOUT" default:"3s" placeholder:"DURATION" help:"How long to wait for the answer (${default})."`
}

// errNotReady ends a command that got the answer of a process that is not ready.
var errNotReady = errors.New("not healthy")

// health is the result of healthcheck as JSON.
type health struct {
	URL   string `json:"url"`
	Ready bool   `json:"ready"`
	// Status is the status of the answer, 0 without one.
	Status int `json:"status"`
}

// Run prints nothing as text if all is well, because it runs every few seconds in a container.
func (c *healthcheckCmd) Run(ctx context.Context, s *streams) error {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, nil)
	if err != nil {
		return &usageError{err}
	}
	found := health{URL: c.URL}
	resp, asked := http.DefaultClient.Do(req)
	if asked == nil {
		_ = resp.Body.Close()
		found.Ready, found.Status = resp.StatusCode == http.StatusOK, resp.StatusCode
	}
	if err := c.print(s.out, found, ""); err != nil {
		return err
	}
	switch {
	case asked != nil:
		return fmt.Errorf("not healthy: %w", asked)
	case !found.Ready:
		return fmt.Errorf("%w: %s answers %s", errNotReady, c.URL, resp.Status)
	}
	return nil
}
