// Package fulfillment is the worker. It makes orders in Postgres of the events that lua/reserve.lua
// appended to the streams, expires orders that are not paid in time, releases their units in Redis,
// and rebuilds Redis when it has lost data.
//
// Worker (worker.go) wires the packages that an order passes, in this order:
//
//   - stream: Subscriber reads entries in batches and acknowledges what was settled.
//   - batch: a Watermill Router passes each message to the Batcher of its partition, which locks the
//     users of a batch.
//   - ledger: records a batch in one transaction. Its package deadletter keeps entries that no worker
//     can apply.
//
// The loops of a worker are files of this package: share.go decides which partitions it reads,
// sweeps.go publishes changed sales, expires overdue orders, releases units, removes ended sales from
// Redis and creates the tables of the next month, and worker_guard.go has package rebuild find and restore
// what Redis lost. sweeps.go also ends silent database sessions. Package survey collects the figures
// that all workers share.
//
// Everything here may happen twice, in any process. An event has one effect because of the unique
// keys in Postgres and because a reservation is released once, not because of a lock or of timing.
package fulfillment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/fulfillment/batch"
	"stampede/fulfillment/metrics"
	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/ledger/draws"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
	"stampede/upkeep/survey"
)

// WorkerConfig configures a Worker. The first three fields have no default.
type WorkerConfig struct {
	Catalog *catalog.Catalog
	// Blocking makes the blocking reads. Acks never wait behind one.
	Blocking redis.UniversalClient
	// Consumer names this worker in the consumer group. It is the same after a restart, and no
	// other process uses it.
	Consumer string

	// BatchMax bounds the orders of one transaction.
	BatchMax int
	// MinIdle is how long another worker may be silent about an entry before this one claims it.
	MinIdle time.Duration
	// MaxDeliveries is how many deliveries a faulty entry gets before it becomes a dead letter.
	MaxDeliveries int64
	// DrainTimeout is how long a stop waits for work in progress.
	DrainTimeout time.Duration
	// TrimInterval is how often handled entries are freed.
	TrimInterval time.Duration
	// SweepInterval is how often unpaid orders expire and how often unpublished changes of sales are sent to Redis.
	// Pending releases are sent, and units offered, as often or oftener.
	SweepInterval time.Duration
	// RetireAfter is how long after its end a sale leaves Redis, once all of its orders are final; 0 for never.
	RetireAfter time.Duration
	// GuardInterval is how often the worker checks whether Redis has lost data and must be rebuilt.
	GuardInterval time.Duration

	Logger *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Tracer traces the orders of traced purchases; nil for none.
	Tracer *tracing.Tracer
}

// Defaults of settings, also of those of the command line.
const (
	DefaultMinIdle      = 10 * time.Second
	DefaultDrainTimeout = 10 * time.Second
)

func (c *WorkerConfig) setDefaults() {
	c.BatchMax = cmp.Or(c.BatchMax, ledger.BatchMax)
	c.MinIdle = cmp.Or(c.MinIdle, DefaultMinIdle)
	c.DrainTimeout = cmp.Or(c.DrainTimeout, DefaultDrainTimeout)
	c.SweepInterval = cmp.Or(c.SweepInterval, 2*time.Second)
	c.GuardInterval = cmp.Or(c.GuardInterval, time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	// The packages below set the other defaults.
}

// Validate returns an error that names every violation. It expects the defaults to be set.
func (c *WorkerConfig) Validate() error {
	var wrong []error
	must := func(holds bool, what string) {
		if !holds {
			wrong = append(wrong, errors.New(what))
		}
	}
	must(c.Blocking != nil, "Blocking is missing")
	if must(c.Catalog != nil, "Catalog is missing"); c.Catalog != nil {
		keys := c.Catalog.Store.Keys
		must(keys.Prefix != "", "Keys.Prefix is missing")
		must(keys.Partitions >= 1 && keys.Partitions <= reservation.MaxPartitions,
			fmt.Sprintf("Keys.Partitions must be 1 to %d", reservation.MaxPartitions))
	}
	must(c.Consumer != "", "Consumer is missing")
	must(c.BatchMax > 0, "BatchMax must be at least 1")
	must(c.DrainTimeout > 0, "DrainTimeout must be positive")
	must(c.RetireAfter >= 0, "RetireAfter must not be negative")
	must(c.SweepInterval > 0, "SweepInterval must be positive")
	must(c.GuardInterval > 0, "GuardInterval must be positive")
	if len(wrong) > 0 {
		return fmt.Errorf("worker config: %w", errors.Join(wrong...))
	}
	return nil
}

// Worker completes reservations: it reads them from the streams of its partitions, writes orders to
// Postgres, expires unpaid ones, and releases the units of rejected, cancelled and expired orders.
// When a partition of Redis has lost data, one worker rebuilds it from Postgres. Any number of workers
// share the work: each partition is read by one of them.
type Worker struct {
	config    WorkerConfig
	metrics   *metrics.Worker
	guardAge  *telemetry.GuardAge
	survey    *survey.Survey
	outcomes  *ledger.Outcomes
	ledger    *ledger.Ledger
	rebuilder *rebuild.Rebuilder

	// partitions is how many there are. It only grows.
	partitions atomic.Int64
	// postgresAway is true while Postgres does not answer this worker.
	postgresAway atomic.Bool
	// reads has the partitions that this worker reads, and takenOver a value after there are more.
	reads     [reservation.MaxPartitions]atomic.Bool
	takenOver chan struct{}
	// ended has a value after orders have ended whose units wait for their release.
	ended chan struct{}
}

// NewWorker returns a Worker. It does not connect to Redis or Postgres yet.
func NewWorker(config WorkerConfig) (*Worker, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	workerMetrics, err := metrics.New(config.Registerer)
	if err != nil {
		return nil, err
	}
	guardAge, err := telemetry.NewGuardAge(config.Registerer, "worker")
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	outcomes, err := ledger.NewOutcomes(ledger.OutcomesConfig{
		Client: config.Catalog.Store.Redis, Keys: config.Catalog.Store.Keys,
		Logger: config.Logger, Registerer: config.Registerer,
	})
	if err != nil {
		return nil, err
	}
	rebuilder, err := rebuild.New(rebuild.Config{
		Catalog: config.Catalog, Logger: config.Logger,
		Registerer: config.Registerer,
	})
	if err != nil {
		return nil, err
	}
	paid, err := ledger.CountPayments(config.Registerer)
	if err != nil {
		return nil, err
	}
	l := ledger.New(config.Catalog.Pool).WithOutcomes(outcomes).WithPayments(paid)
	rebuilder.Ledger = l // also publishes the outcomes of drained orders
	w := &Worker{
		config: config, metrics: workerMetrics, guardAge: guardAge, outcomes: outcomes, ledger: l, rebuilder: rebuilder,
		takenOver: make(chan struct{}, 1), ended: make(chan struct{}, 1),
	}
	w.metrics.Reads(0, "Postgres has not answered it yet")
	if w.survey, err = survey.New(survey.Config{
		Catalog: config.Catalog, Logger: config.Logger,
		Shut: w.shutSales, Registerer: config.Registerer,
	}); err != nil {
		return nil, err
	}
	return w, w.setPartitions(config.Catalog.Store.Keys.Partitions)
}

// setPartitions sets how many partitions there are. It creates their counters: increase() misses the
// first event of a counter that appears with it.
func (w *Worker) setPartitions(n int) error {
	w.partitions.Store(int64(n))
	subscriber, err := newWorkerSubscriber(&w.config)
	if err != nil {
		return err
	}
	streams := w.streams()
	subscriber.CreateMetrics(streams)
	for _, key := range streams {
		w.metrics.Readers.WithLabelValues(key)
		if _, err := newWorkerTrimmer(&w.config, key); err != nil {
			return err
		}
	}
	return nil
}

// streams are the streams of all partitions.
func (w *Worker) streams() []string {
	streams := make([]string, w.partitions.Load())
	for p := range streams {
		streams[p] = w.config.Catalog.Store.Keys.Orders(p)
	}
	return streams
}

func newWorkerTrimmer(config *WorkerConfig, key string) (*stream.Trimmer, error) {
	return stream.NewTrimmer(stream.TrimmerConfig{
		Control: config.Catalog.Store.Redis, Stream: key, Interval: config.TrimInterval,
		Logger: config.Logger, Registerer: config.Registerer,
	})
}

func newWorkerSubscriber(config *WorkerConfig) (*stream.Subscriber, error) {
	letters := deadletter.NewStore(config.Catalog.Pool, config.Catalog.Store.Redis, config.Catalog.Store)
	subscriber, err := stream.NewSubscriber(stream.Config{
		Client: config.Blocking, Control: config.Catalog.Store.Redis, Group: reservation.Group, Consumer: config.Consumer,
		InFlightMax: 4 * max(config.BatchMax, order.MaxPerMessage), MinIdle: config.MinIdle,
		MaxDeliveries: config.MaxDeliveries,
		DrainTimeout:  config.DrainTimeout,
		DeadLetter:    letters.Park, Logger: config.Logger, Registerer: config.Registerer,
	})
	if err != nil {
		return nil, fmt.Errorf("worker config: %w", err)
	}
	return subscriber, nil
}

// Run works until ctx is done, then finishes work in progress within DrainTimeout and returns nil. Its error is one for
// which sql.IsUnfit is true if it cannot work with the database. It may be called once. While Redis or Postgres is away
// it waits.
func (w *Worker) Run(ctx context.Context) error {
	partitions, err := w.awaitPostgres(ctx)
	if ctx.Err() != nil {
		return nil
	} else if err != nil {
		return err
	}
	if err := w.setPartitions(partitions); err != nil {
		return err
	}
	unregister, err := w.registerBacklog()
	if err != nil {
		return err
	}
	defer unregister()
	w.config.Logger.Info("worker started", "consumer", w.config.Consumer, "partitions", partitions)
	defer w.config.Logger.Info("worker stopped", "consumer", w.config.Consumer)
	defer w.publishOutcomes(ctx)()

	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return w.readAssigned(ctx) })
	for _, duty := range []func(context.Context){
		w.sweepOrders, w.drawUnits, w.endBlockers, w.makeMonths, w.guard, w.sweep, w.retireSales, w.survey.Run,
	} {
		all.Go(func() error {
			duty(ctx)
			return nil
		})
	}
	return all.Wait()
}

// publishOutcomes publishes the outcomes of orders to the ingresses until stop is called; stop
// waits for the last.
func (w *Worker) publishOutcomes(ctx context.Context) (stop func()) {
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	var publishing sync.WaitGroup
	publishing.Go(func() { w.outcomes.Run(ctx) })
	return func() {
		end()
		publishing.Wait()
	}
}

// errRouterEnded is returned if the Router ends before ctx.
var errRouterEnded = errors.New("the router stopped unexpectedly")

// fulfil reads one partition, by a Router with one handler, and frees its handled entries, until ctx
// ends; then it drains.
func (w *Worker) fulfil(ctx context.Context, partition int) error {
	key := w.config.Catalog.Store.Keys.Orders(partition)
	trimmer, err := newWorkerTrimmer(&w.config, key)
	if err != nil {
		return err
	}
	subscriber, err := newWorkerSubscriber(&w.config)
	if err != nil {
		return err
	}
	router, err := message.NewRouter(
		// The subscriber drains by itself; only a handler that hangs would make the Router wait
		// longer.
		message.RouterConfig{CloseTimeout: w.config.DrainTimeout + 5*time.Second},
		// The Router logs every step of its life as info; only its errors matter.
		untraced{
			watermill.NewSlogLoggerWithLevelMapping(w.config.Logger, map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}),
		},
	)
	if err != nil {
		return fmt.Errorf("make the router: %w", err)
	}
	// No promise rests on the locks of users: they save double work.
	locker := lock.New(w.config.Catalog.Store.Redis, lock.MayVanish(),
		lock.WithPrefix(w.config.Catalog.Store.Keys.Locker(partition)), lock.WithObserver(w.metrics.LockObserver()))
	defer w.closeLocker(ctx, locker)
	b := batch.New(batch.Config{
		Ledger: w.ledger, Store: w.config.Catalog.Store, Draws: draws.New(w.config.Catalog.Pool), Locker: locker,
		Keys: w.config.Catalog.Store.Keys, Partition: partition,
		BatchMax: w.config.BatchMax, Lease: batch.LockLease(w.config.MinIdle),
		Logger: w.config.Logger, Metrics: w.metrics, Rebuilder: w.rebuilder, Tracer: w.config.Tracer,
	})
	router.AddConsumerHandler("fulfil "+key, key, subscriber, b.Handle)
	defer context.AfterFunc(ctx, b.Drain)()

	// Both run while the Router drains, and end after it.
	draining, drained := context.WithCancel(context.WithoutCancel(ctx))
	var beside sync.WaitGroup
	beside.Go(func() { _ = b.Run(draining) }) // returns nil
	beside.Go(func() { trimmer.Run(draining) })
	err = router.Run(ctx)
	_ = subscriber.Close() // returns nil, after the last acks or DrainTimeout
	drained()
	beside.Wait()
	switch {
	case err != nil:
		return fmt.Errorf("run the router: %w", err)
	case ctx.Err() == nil:
		return errRouterEnded
	}
	return nil
}

// untraced drops the Router's traces: two lines for each message, which the slog adapter formats
// before it checks the level.
type untraced struct{ watermill.LoggerAdapter }

func (untraced) Trace(string, watermill.LogFields) {}

func (l untraced) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return untraced{l.LoggerAdapter.With(fields)}
}

// closeLocker releases the locks that the batches could not release.
func (w *Worker) closeLocker(ctx context.Context, l *lock.Locker) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	if err := l.Close(ctx); err != nil {
		w.config.Logger.Debug("locks of users were not released: they end with their leases", "error", err)
	}
}

// shutSales counts the sales that sell nothing until a rebuild.
func (w *Worker) shutSales(ctx context.Context) (int, error) {
	return w.rebuilder.Shut(ctx, int(w.partitions.Load()))
}

// backlogWait bounds how long a scrape waits for Redis. stampede top and the dashboard scrape each second, and a worker
// whose Redis hangs must not look like one that is gone.
const backlogWait = 500 * time.Millisecond

// registerBacklog adds the backlog of all streams to the metrics while the worker runs, whichever
// worker reads them.
func (w *Worker) registerBacklog() (unregister func(), err error) {
	if w.config.Registerer == nil {
		return func() {}, nil
	}
	behind := func(name string) int64 { return w.rebuilder.Behind(slices.Index(w.streams(), name)) }
	backlog := stream.NewBacklogCollector(
		w.config.Catalog.Store.Redis, reservation.Group, w.streams, behind, backlogWait, w.config.Logger)
	if err := w.config.Registerer.Register(backlog); err != nil {
		return nil, fmt.Errorf("register the backlog's metrics: %w", err)
	}
	return func() { w.config.Registerer.Unregister(backlog) }, nil
}
