package main

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment"
	"stampede/internal/connect"
	"stampede/internal/telemetry"
	"stampede/reservation"
)

// workerPostgresConns is enough for two batches in each of a few partitions, and the rest.
const workerPostgresConns = 8

// workerFlags are common to work and dev.
type workerFlags struct {
	Consumer      string        `placeholder:"NAME" help:"Name of this worker, unique and stable across restarts (default: host name and lane)."`
	BatchMax      int           `default:"500" placeholder:"ORDERS" help:"Most orders per transaction (${default})."`
	MinIdle       time.Duration `default:"10s" placeholder:"DURATION" help:"How long another worker may be inactive on an order before this one takes it over; a lost worker is replaced within half of it; the same for all workers (${default})."`
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
	DrainTimeout time.Duration `default:"10s" placeholder:"DURATION" help:"How long a stopping worker may take to finish started work (${default})."`
	MetricsAddr  string        `default:":9090" placeholder:"HOST:PORT" help:"Address for /metrics, /livez and /readyz (${default})."`
}

// Validate is called by kong.
func (c *workCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.workerFlags.Validate(), c.profileFlag.check(c.MetricsAddr),
		wantAtLeast("--drain-timeout", c.DrainTimeout, time.Millisecond))
}

func (c *workCmd) Run(ctx context.Context, logger *slog.Logger) error {
	collectLess()
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
	config := workerConfig(b, c.workerFlags, registry, logger)
	config.Tracer, config.Consumer, config.DrainTimeout = tracer, consumer, c.DrainTimeout
	// Create the worker before serving /metrics: it registers the series.
	runWorker, err := newWorker(c.RedisURL, config)
	if err != nil {
		return err
	}

	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return c.serve(ctx, c.MetricsAddr, registry, b.ready) })
	running.Go(func() error { return runWorker(ctx) })
	return running.Wait()
}

func workerConfig(
	b *backend, flags workerFlags, registry prometheus.Registerer, logger *slog.Logger,
) fulfillment.WorkerConfig {
	return fulfillment.WorkerConfig{
		Pool: b.pool, Control: b.redis, Keys: b.keys, Store: b.store, Catalog: b.catalog,
		BatchMax: flags.BatchMax, MinIdle: flags.MinIdle, MaxDeliveries: flags.MaxDeliveries,
		RetireAfter: flags.RetireAfter, Logger: logger, Registerer: registry,
	}
}

// newWorker adds the client for the blocking reads, which must not be shared. It is closed when runWorker ends.
func newWorker(redisURL string, config fulfillment.WorkerConfig) (runWorker func(context.Context) error, err error) {
	blocking, err := connect.Blocking(redisURL)
	if err != nil {
		return nil, err
	}
	config.Blocking = blocking
	pools := connect.NewPools("worker")
	pools.Redis("control", config.Control)
	pools.Redis("reads", blocking)
	pools.Postgres("worker", config.Pool)
	if err := pools.Register(config.Registerer); err != nil {
		_ = blocking.Close()
		return nil, err
	}
	worker, err := fulfillment.NewWorker(config)
	if err != nil {
		_ = blocking.Close()
		return nil, &usageError{err}
	}
	return func(ctx context.Context) error {
		defer func() { _ = blocking.Close() }()
		return worker.Run(ctx)
	}, nil
}
