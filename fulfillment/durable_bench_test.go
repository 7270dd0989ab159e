package fulfillment

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/benchkit"
	"stampede/internal/testkit"
	"stampede/reservation"
)

const (
	// durableOrders is a backlog that takes our worker about a second.
	durableOrders = 20_000
	// durableAtMost ends the turn of a candidate that is not through by then.
	durableAtMost = 4 * time.Second
)

// BenchmarkDurable compares how fast a backlog of reservations becomes orders in Postgres: one worker
// process as it is, against 64 of watermill-redisstream's own subscribers with the same ledger.
func BenchmarkDurable(b *testing.B) {
	pool := testkit.Pool(b)
	benchkit.Compare(b, "orders/s",
		benchkit.Candidate{Name: "worker", Round: func(int) float64 {
			return durablePerSecond(b, newShop(b, pool), runWorkerBench)
		}},
		benchkit.Candidate{Name: "64-stock-subscribers", Round: func(int) float64 {
			return durablePerSecond(b, newShop(b, pool), runStockBench)
		}},
	)
}

// durablePerSecond fills a stream, lets run work on it, and counts what is in Postgres.
func durablePerSecond(b *testing.B, s *shop, run func(context.Context, *testing.B, *shop)) float64 {
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
		run(ctx, b, s)
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

// runStockBench is the same worker as one would build it from the stock parts.
func runStockBench(ctx context.Context, b *testing.B, s *shop) {
	ledger := NewLedger(s.pool)
	handle := func(msg *message.Message) error {
		event, err := reservation.DecodeReserved(msg)
		if err != nil {
			return err
		}
		_, err = ledger.Record(msg.Context(), []reservation.OrderReserved{event})
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		b.Error(err)
		return
	}
	options, err := redis.ParseURL(testkit.RedisURL(b))
	if err != nil {
		b.Error(err)
		return
	}
	for i := range 64 {
		subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
			Client: redis.NewClient(options), ConsumerGroup: reservation.Group, Consumer: fmt.Sprint("stock-", i),
			DisableIndefiniteInitialBlock: true, OldestId: "0",
		}, watermill.NopLogger{})
		if err != nil {
			b.Error(err)
			return
		}
		router.AddConsumerHandler(fmt.Sprint("stock-", i), s.keys.Orders(0), subscriber, handle) // closes its client
	}
	if err := router.Run(ctx); err != nil {
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
