package order_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/dev/localserver"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// A consumer of one's own reads the accepted orders of a partition with Watermill's subscriber, in a group of its own.
func ExampleDecodeReserved() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	server, err := localserver.StartRedis(ctx, localserver.RedisOptions{}) // yours is that of REDIS_URL
	if err != nil {
		log.Fatal(err)
	}
	defer server.Stop()
	options, err := redis.ParseURL(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(options)
	keys := reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1} // STAMPEDE_PARTITIONS
	sale := uuid.Must(uuid.NewV7())
	rdb.XAdd(ctx, &redis.XAddArgs{Stream: keys.Orders(0), Values: stream.Values(order.OrderReserved{ // as an ingress does
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 2, Epoch: 1, Sequence: 17,
		ReservedAt: time.UnixMilli(1790925461749),
	})})

	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: rdb, ConsumerGroup: "analytics", OldestId: "0",
	}, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = subscriber.Close() }()
	messages, err := subscriber.Subscribe(ctx, keys.Orders(0)) // one stream for each partition
	if err != nil {
		log.Fatal(err)
	}
	msg := <-messages // range over them
	reserved, err := order.DecodeReserved(msg)
	if err != nil {
		log.Print(err) // errors.Is(err, order.ErrUndecodable): retries do not help
	}
	for _, o := range reserved { // a message has all orders of one call of the script
		fmt.Println(o.UserID, o.Quantity, o.Sequence) // process each o.OrderID once
	}
	msg.Ack()
	// Output: ann 2 17
}
