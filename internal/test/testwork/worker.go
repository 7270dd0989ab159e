package testwork

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/fulfillment/batch"
	"stampede/fulfillment/metrics"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

func Config(t testing.TB, s *testshop.Shop) fulfillment.WorkerConfig {
	return fulfillment.WorkerConfig{
		Pool: s.Pool, Blocking: s.Blocking, Control: s.Rdb, Keys: s.Keys, Store: s.Store, Catalog: s.Catalog,
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
