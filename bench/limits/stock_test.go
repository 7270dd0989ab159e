package limits

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/reservation"
	"stampede/reservation/order"
)

// consumeStock uses watermill-redisstream unchanged: a router whose subscribers, in one consumer group,
// read Stampede's own stream.
func consumeStock(ctx context.Context, c consumer, ready func()) error {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	options, err := redis.ParseURL(c.RedisURL)
	if err != nil {
		return err
	}
	handle := func(msg *message.Message) error {
		events, err := order.DecodeReserved(msg)
		if err != nil {
			return err
		}
		if !c.Together {
			return c.recordAll(msg.Context(), events)
		}
		var all errgroup.Group
		for _, event := range events {
			all.Go(func() error { return c.record(msg.Context(), event) })
		}
		return all.Wait()
	}
	for i := range c.Handlers {
		name := fmt.Sprint("stock-", i)
		subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
			// One client each: in a shared one, subscribers that block in reads would occupy all
			// connections.
			Client: redis.NewClient(options), ConsumerGroup: reservation.Group, Consumer: name,
			DisableIndefiniteInitialBlock: true, OldestId: "0",
		}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		router.AddConsumerHandler(name, c.Stream, subscriber, handle) // closes its client
	}
	go func() {
		<-router.Running()
		ready()
	}()
	return router.Run(ctx)
}
