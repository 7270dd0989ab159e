package fulfillment

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/benchkit"
	"stampede/internal/testkit"
	"stampede/reservation"
)

const (
	// durableOrders is a backlog that takes our worker about a second.
	durableOrders = 20_000
	// durableAtMost ends a turn that is not through by then.
	durableAtMost = 4 * time.Second
)

// BenchmarkDurable measures how fast a worker makes a backlog of reservations orders in Postgres. It runs in this
// process, to be profiled; how others do the same work is in bench/queues.
func BenchmarkDurable(b *testing.B) {
	pool := testkit.Pool(b)
	benchkit.Compare(b, "orders/s",
		benchkit.Candidate{Name: "worker", Round: func(int) float64 {
			return durablePerSecond(b, newShop(b, pool))
		}},
	)
}

// durablePerSecond fills a stream, lets a worker work on it, and counts what is in Postgres.
func durablePerSecond(b *testing.B, s *shop) float64 {
	b.Helper()
	sale := s.open(b, durableOrders)
	const buyers = 100 // at once; more would find the queue full
	for first := 0; first < durableOrders; first += buyers {
		var wg sync.WaitGroup
		for i := range buyers {
			wg.Go(func() {
				_, err := s.store.Reserve(b.Context(), reservation.Request{Sale: sale, User: fmt.Sprint("user-", first+i), Quantity: 1})
				if err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}

	ctx, stop := context.WithCancel(b.Context())
	done := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(done)
		runWorkerBench(ctx, b, s)
	}()
	var sold int64
	nowAndThen := time.NewTicker(10 * time.Millisecond) // asking is work, too
	defer nowAndThen.Stop()
	for sold < durableOrders && time.Since(began) < durableAtMost {
		<-nowAndThen.C
		require.NoError(b, s.pool.QueryRow(b.Context(), `SELECT sold FROM sales WHERE id = $1`, sale).Scan(&sold))
	}
	took := time.Since(began)
	stop()
	<-done
	s.forget(b, sale)
	return float64(sold) / took.Seconds()
}

func runWorkerBench(ctx context.Context, b *testing.B, s *shop) {
	worker, err := NewWorker(WorkerConfig{
		Pool: s.pool, Blocking: s.blocking, Control: s.rdb, Keys: s.keys, Store: s.store, Catalog: s.catalog,
		Consumer: "bench", Logger: slog.New(slog.DiscardHandler),
	})
	if err == nil {
		err = worker.Run(ctx)
	}
	if err != nil {
		b.Error(err)
	}
}

// forget frees what a turn has left behind.
func (s *shop) forget(b *testing.B, sale uuid.UUID) {
	b.Helper()
	require.NoError(b, s.rdb.Unlink(b.Context(), s.keys.Sale(0, sale), s.keys.Buyers(0, sale), s.keys.Orders(0)).Err())
	for _, table := range []string{"order_events", "orders"} {
		_, err := s.pool.Exec(b.Context(), "TRUNCATE "+table)
		require.NoError(b, err)
	}
}
