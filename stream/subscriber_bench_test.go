package stream

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// BenchmarkSubscriber compares what message.Subscribers can deliver through a Router whose handler
// does nothing: one of ours and 64 of watermill-redisstream's. All entries are in the stream beforehand.
//
//	go test -run '^$' -bench BenchmarkSubscriber -benchtime 100000x ./stream
func BenchmarkSubscriber(b *testing.B) {
	b.Run("own", func(b *testing.B) {
		blocking, err := connect.Blocking(testkit.RedisURL(b))
		require.NoError(b, err)
		defer func() { _ = blocking.Close() }()
		control := testkit.Redis(b)
		sub, err := NewSubscriber(Config{
			Client: blocking, Control: control, Group: reservation.Group, Consumer: "bench",
			DeadLetter: func(context.Context, Entry, error) error { return nil },
			Logger:     slog.New(slog.DiscardHandler),
		})
		require.NoError(b, err)
		benchmarkConsumption(b, []message.Subscriber{sub})
	})
	b.Run("stock-64", func(b *testing.B) {
		subs := make([]message.Subscriber, 64)
		for i := range subs {
			options, err := redis.ParseURL(testkit.RedisURL(b))
			require.NoError(b, err)
			sub, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
				Client: redis.NewClient(options), ConsumerGroup: reservation.Group,
				Consumer: fmt.Sprint("bench-", i), DisableIndefiniteInitialBlock: true,
			}, nil)
			require.NoError(b, err)
			subs[i] = sub // closes its client
		}
		benchmarkConsumption(b, subs)
	})
}

// benchmarkConsumption handles b.N entries of one stream, and ends when all of them are acknowledged.
func benchmarkConsumption(b *testing.B, subs []message.Subscriber) {
	rdb := testkit.Redis(b)
	stream := testkit.Keys(b).Orders(0)
	fillStream(b, rdb, stream, b.N)
	require.NoError(b, CreateGroup(b.Context(), rdb, stream, reservation.Group))

	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(b, err)
	var left atomic.Int64
	left.Store(int64(b.N))
	done := make(chan struct{})
	for i, sub := range subs {
		router.AddConsumerHandler(fmt.Sprint("bench-", i), stream, sub, func(*message.Message) error {
			if left.Add(-1) == 0 {
				close(done)
			}
			return nil
		})
	}
	b.ReportAllocs()
	b.ResetTimer()
	stopped := make(chan error)
	go func() { stopped <- router.Run(b.Context()) }()
	<-done
	for rdb.XPending(b.Context(), stream, reservation.Group).Val().Count > 0 { // a round trip each
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	require.NoError(b, router.Close())
	require.NoError(b, <-stopped)
}

// fillStream appends entries that look like those of lua/reserve.lua.
func fillStream(b *testing.B, rdb redis.UniversalClient, stream string, n int) {
	const page = 1000
	sale := uuid.New()
	for sent := 0; sent < n; sent += page {
		_, err := rdb.Pipelined(b.Context(), func(pipe redis.Pipeliner) error {
			for i := sent; i < min(n, sent+page); i++ {
				pipe.XAdd(b.Context(), &redis.XAddArgs{Stream: stream, Values: Values(order.OrderReserved{
					OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "user-1", Quantity: 1, Epoch: 1, Sequence: int64(i),
					ReservedAt: time.Now(),
				})})
			}
			return nil
		})
		require.NoError(b, err)
	}
}
