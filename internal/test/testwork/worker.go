// Package testwork lets tests do what workers and operators do on a shop of package testshop.
package testwork

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/fulfillment/batch"
	"stampede/fulfillment/metrics"
	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/archive"
	"stampede/upkeep/rebuild"
)

// Main runs the tests of a package on their own servers. A test may start the same binary as a process of its shop,
// which it kills.
func Main(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

func command() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runProcess(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// process is what a process of a shop works with.
type process struct {
	pool              *pgxpool.Pool
	blocking, control redis.UniversalClient
	keys              reservation.Keys
	store             *reservation.Store
}

func runProcess(ctx context.Context, args []string) error {
	if err := crashpoint.Check(); err != nil {
		return err
	}
	p := process{keys: reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX")}}
	var err error
	if p.keys.Partitions, err = strconv.Atoi(os.Getenv("STAMPEDE_PARTITIONS")); err != nil {
		return err
	}
	if p.pool, err = connect.Postgres(ctx, os.Getenv("DATABASE_URL"), 4); err != nil {
		return err
	}
	defer p.pool.Close()
	if p.blocking, err = connect.Blocking(os.Getenv("REDIS_URL")); err != nil {
		return err
	}
	defer func() { _ = p.blocking.Close() }()
	if p.control, err = connect.Control(os.Getenv("REDIS_URL")); err != nil {
		return err
	}
	defer func() { _ = p.control.Close() }()
	// Many buyers on a busy machine wait long.
	p.store = reservation.NewStore(p.control, p.keys, reservation.StoreOptions{WaitMax: time.Minute})
	defer p.store.Close()
	return p.run(ctx, args)
}

func (p process) run(ctx context.Context, args []string) error {
	switch args[0] {
	case "worker":
		return p.work(ctx, 0)
	case "retiring worker":
		return p.work(ctx, time.Millisecond)
	case "archive": // a sale, into a folder
		a, err := archive.New(ctx, archive.Config{
			Catalog: catalog.New(p.pool, p.store), Dir: args[2], Logger: slog.Default(),
		})
		if err != nil {
			return err
		}
		defer a.Close()
		_, err = a.Sale(ctx, uuid.MustParse(args[1]))
		return err
	case "report": // a payment with this reference, of this order
		_, err := ledger.New(p.pool).Report(ctx, order.Money{Reference: args[1], OrderID: uuid.MustParse(args[2])})
		return err
	case "beacon": // of the draw of a sale: a round, and its signature
		round, err := strconv.ParseInt(args[2], 10, 64)
		if err != nil {
			return err
		}
		signature, err := hex.DecodeString(args[3])
		if err != nil {
			return err
		}
		_, err = draws.New(p.pool).Beacon(ctx, uuid.MustParse(args[1]), round, signature)
		return err
	case "restore": // a file
		_, err := archive.Restore(ctx, p.pool, args[1])
		return err
	}
	r, err := rebuild.New(rebuild.Config{Catalog: catalog.New(p.pool, p.store)})
	if err != nil {
		return err
	}
	sale := uuid.MustParse(args[1])
	switch args[0] {
	case "rebuild": // a sale
		_, err = r.Sale(ctx, sale, rebuild.ReasonByHand)
	case "raise shards": // of a sale, to a number
		var shards int
		if shards, err = strconv.Atoi(args[2]); err == nil {
			_, err = r.RaiseShards(ctx, sale, shards, rebuild.ReasonByHand)
		}
	default:
		err = fmt.Errorf("testwork has no command %q", args[0])
	}
	return err
}

// work runs a worker. A sale leaves Redis so long after its end; never for 0.
func (p process) work(ctx context.Context, retireAfter time.Duration) error {
	worker, err := fulfillment.NewWorker(fulfillment.WorkerConfig{
		Blocking: p.blocking,
		Catalog:  catalog.New(p.pool, p.store), Consumer: "worker",
		SweepInterval: 50 * time.Millisecond, GuardInterval: 50 * time.Millisecond, MinIdle: time.Second,
		RetireAfter: retireAfter,
		Logger:      slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return worker.Run(ctx)
}

func Config(t testing.TB, s *testshop.Shop) fulfillment.WorkerConfig {
	return fulfillment.WorkerConfig{
		Blocking: s.Blocking, Catalog: s.Catalog,
		Consumer: "worker", SweepInterval: 50 * time.Millisecond, TrimInterval: 50 * time.Millisecond,
		Logger: testkit.Logger(t),
	}
}

// Work runs a worker until stop is called or the test ends.
func Work(t testing.TB, config fulfillment.WorkerConfig) (stop func()) {
	t.Helper()
	worker, err := fulfillment.NewWorker(config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("worker: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the worker does not stop")
		}
	})
	t.Cleanup(stop)
	return stop
}

// AwaitRest waits until the workers have processed all entries of the streams.
func AwaitRest(t testing.TB, s *testshop.Shop) {
	t.Helper()
	for p := range s.Keys.Partitions {
		testkit.Eventually(t, 30*time.Second, "all entries of the stream are processed", func() bool {
			b, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
			require.NoError(t, err)
			return b.LagKnown && b.Lag+b.Pending == 0
		})
	}
}

// Guarded runs a worker that often checks what has to be rebuilt, and returns its metrics and its log.
func Guarded(t testing.TB, s *testshop.Shop) (registry *prometheus.Registry, log *testshop.CountingLog) {
	t.Helper()
	registry, log = prometheus.NewRegistry(), &testshop.CountingLog{}
	config := Config(t, s)
	config.GuardInterval, config.Registerer, config.Logger = 20*time.Millisecond, registry, slog.New(log)
	Work(t, config)
	return registry, log
}

// Rebuilds returns the number of finished rebuilds, for all reasons.
func Rebuilds(t testing.TB, registry *prometheus.Registry) (n float64) {
	t.Helper()
	for _, reason := range []string{
		rebuild.ReasonServer, rebuild.ReasonUnverified, rebuild.ReasonSaleLost, rebuild.ReasonUnfinished,
		rebuild.ReasonSetBack, rebuild.ReasonRefused, rebuild.ReasonByHand, rebuild.ReasonReconciled,
	} {
		n += testshop.Metric(t, registry, "stampede_rebuilds_total", reason)
	}
	return n
}

// RequireNoNeeds requires that neither a partition nor a sale needs a rebuild, including ended sales.
func RequireNoNeeds(t testing.TB, s *testshop.Shop, partitions int) {
	t.Helper()
	found, err := Rebuilder(t, s).Needs(t.Context(), partitions, true)
	require.NoError(t, err)
	require.Empty(t, found)
}

// Batcher makes a batcher of the shop; change, if not nil, alters its configuration.
func Batcher(t testing.TB, s *testshop.Shop, change func(*batch.Config)) *batch.Batcher {
	t.Helper()
	m, err := metrics.New(nil)
	require.NoError(t, err)
	config := batch.Config{
		// Tests lock rows for a long time.
		Ledger: ledger.New(s.Pool).WithLockTimeout(time.Minute), Store: s.Store, Draws: draws.New(s.Pool),
		Locker: lock.New(s.Rdb), Keys: s.Keys, BatchMax: ledger.BatchMax, Lease: 10 * time.Second,
		Logger: testkit.Logger(t), Metrics: m,
	}
	if change != nil {
		change(&config)
	}
	t.Cleanup(func() {
		closing, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		_ = config.Locker.Close(closing) // some tests have stopped Redis
	})
	return batch.New(config)
}

// Batch makes a batcher, and runs it until the test ends.
func Batch(t testing.TB, s *testshop.Shop, change func(*batch.Config)) *batch.Batcher {
	t.Helper()
	b := Batcher(t, s, change)
	RunBatcher(t, b)
	return b
}

// RunBatcher runs a batcher until the test ends.
func RunBatcher(t testing.TB, b *batch.Batcher) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, testshop.Answer(t, ended), "Run")
	})
}

// newMessage is a message with these orders of one sale, as a subscriber delivers it.
func newMessage(t testing.TB, events ...order.OrderReserved) *message.Message {
	t.Helper()
	msg, err := stream.DecodeEntry("1-1", stream.Values(events...), 1)
	require.NoError(t, err)
	return msg
}

// Messages has a message of its own for each order in the stream.
func Messages(t testing.TB, s *testshop.Shop) (all []*message.Message) {
	t.Helper()
	for _, event := range s.Events(t, 0) {
		all = append(all, newMessage(t, event))
	}
	return all
}

// Handle passes messages to the batcher as the Router would, and returns channels for the results.
func Handle(b *batch.Batcher, msgs ...*message.Message) []chan error {
	answers := make([]chan error, len(msgs))
	for i, msg := range msgs {
		answers[i] = make(chan error, 1)
		go func() { answers[i] <- b.Handle(msg) }()
	}
	return answers
}

// RequireDone waits for the results of Handle, which are no errors.
func RequireDone(t testing.TB, answers []chan error, why ...any) {
	t.Helper()
	for _, a := range answers {
		require.NoError(t, testshop.Answer(t, a), why...)
	}
}

// RequireAllFail waits for the results of Handle, which are this error.
func RequireAllFail(t testing.TB, answers []chan error, err error) {
	t.Helper()
	for _, a := range answers {
		require.ErrorIs(t, testshop.Answer(t, a), err)
	}
}
