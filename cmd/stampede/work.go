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
	"stampede/internal/tracing"
	"stampede/reservation"
)

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
		Pool: b.pool, Control: b.redis, Blocking: blocking, Keys: b.keys, Store: b.store, Catalog: b.catalog,
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
