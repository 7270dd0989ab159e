package testwork

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/stream"
)

func Config(s *testshop.Shop, t testing.TB) fulfillment.WorkerConfig {
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
func AwaitRest(s *testshop.Shop, t testing.TB) {
	t.Helper()
	for p := range s.Keys.Partitions {
		testkit.Eventually(t, 30*time.Second, "all entries of the stream are processed", func() bool {
			b, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
			require.NoError(t, err)
			return b.LagKnown && b.Lag+b.Pending == 0
		})
	}
}
