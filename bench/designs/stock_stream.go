package designs

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"stampede/bench/front"
)

//go:embed lua/take_stream.lua
var takeStreamSource string

var takeStreamScript = redis.NewScript(takeStreamSource)

// stockStream is the end of better tutorials: the same script also appends the order to a Redis stream,
// and a consumer group writes what it reads to the database. Here the consumers are the subscribers of
// watermill-redisstream, as many as help.
//
// What it gets right: unit and order are taken in one step, and the order is on the disk of Redis
// before the buyer gets the answer. The entries of a dead process stay in the pending list, another
// process claims them, and each row is written once because the order's id is its key. Nothing is lost.
//
// How it fails: its answers are correct but expensive. Every buyer is a script call, and every order
// its own read, transaction and ack: each subscriber holds one message at a time. So the stream grows
// during a rush, and nothing trims it. Orphaned entries are claimed only after an idle time, and an
// entry that cannot be decoded stops its subscriber.
type stockStream struct {
	*redisStock
	redisURL string
	maxIdle  time.Duration
}

const (
	// stockSubscribers: Postgres syncs concurrent commits together, and more subscribers than this are
	// not faster on a few cores.
	stockSubscribers = 16
	// Orders of a dead process are claimed after seconds instead of the library's 60 s, which is long
	// for a buyer. It is still hundreds of times as long as a transaction.
	stockMaxIdleMS = 5000
	// stockClaims is how often a subscriber looks for orphaned entries within the idle time.
	stockClaims     = 5
	stockClaimDelay = (stockMaxIdleMS + 2*stockMaxIdleMS/stockClaims) * time.Millisecond
	// stockResend is the pause before a nacked message is delivered again. Without it, the library's
	// default, a subscriber repeats one message as fast as it can while Postgres is unavailable.
	stockResend = 100 * time.Millisecond
	// stockSubscriberConnections: for reads, claims, checks of consumers, and acks.
	stockSubscriberConnections = 4
	stockGroup                 = "fulfillment"
)

func newStockStream(ctx context.Context, b front.Backend) (front.Design, error) {
	maxIdleMS, err := option(b, "max-idle-ms", stockMaxIdleMS)
	if err != nil {
		return nil, err
	}
	stock, err := openRedisStock(ctx, b, stockSubscribers)
	if err != nil {
		return nil, err
	}
	return &stockStream{
		redisStock: stock, redisURL: b.RedisURL, maxIdle: time.Duration(maxIdleMS) * time.Millisecond,
	}, nil
}

func (d *stockStream) streamKey() string { return d.prefix + ":orders" }

// streamOrder is the payload of a message. The order's id is the message's UUID.
type streamOrder struct {
	Sale     uuid.UUID `json:"sale_id"`
	User     string    `json:"user_id"`
	Quantity int64     `json:"quantity"`
}

// Buy implements front.Design.
func (d *stockStream) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	payload, err := json.Marshal(streamOrder{Sale: o.Sale, User: o.User, Quantity: o.Quantity})
	if err != nil {
		return none, fmt.Errorf("write order=%s: %w", o.ID, err)
	}
	keys := []string{d.stockKey(o.Sale), d.buyersKey(o.Sale), d.streamKey()}
	answer, err := takeStreamScript.Run(ctx, d.rdb, keys, o.User, o.Quantity, o.ID.String(), payload).Int()
	if err != nil {
		return none, fmt.Errorf("take units of the stock: %w", err)
	}
	if refusal, err := scriptVerdict(answer); refusal != none || err != nil {
		return refusal, err
	}
	return front.Reserved, nil
}

// Run implements front.Design: it is this process's part of the consumer group.
func (d *stockStream) Run(ctx context.Context) error {
	var consumers errgroup.Group
	for range stockSubscribers {
		subscriber, err := d.newSubscriber(errorLog{ctx: ctx})
		if err != nil {
			return err
		}
		consumers.Go(func() error { return d.consume(ctx, subscriber) })
	}
	return consumers.Wait()
}

func (d *stockStream) newSubscriber(log watermill.LoggerAdapter) (*redisstream.Subscriber, error) {
	client, err := openRedis(d.redisURL, stockSubscriberConnections)
	if err != nil {
		return nil, err
	}
	// The library generates a random name of the consumer.
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client:          client,
		ConsumerGroup:   stockGroup,
		NackResendSleep: stockResend,
		ClaimInterval:   d.maxIdle / stockClaims,
		MaxIdleTime:     d.maxIdle,
		// A read that blocks without a timeout would not end at shutdown either.
		DisableIndefiniteInitialBlock: true,
	}, log)
	if err != nil {
		return nil, fmt.Errorf("make a subscriber: %w", err)
	}
	return subscriber, nil
}

// consume writes what the subscriber reads until ctx is done. If one subscriber ends early, the others
// continue.
func (d *stockStream) consume(ctx context.Context, subscriber *redisstream.Subscriber) error {
	defer func() { _ = subscriber.Close() }() // closes its client as well
	messages, err := subscriber.Subscribe(ctx, d.streamKey())
	if err == nil {
		for m := range messages {
			if err := d.record(m); err != nil {
				slog.Warn("writing an order failed; it will be delivered again", "order", m.UUID, "error", err)
				m.Nack()
				continue
			}
			m.Ack()
		}
		err = errors.New("the subscriber ended early")
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("consume orders: %w", err)
}

// record writes one order in its own transaction. A failed message is delivered again.
func (d *stockStream) record(m *message.Message) error {
	id, err := uuid.Parse(m.UUID)
	if err != nil {
		return fmt.Errorf("message %s: %w", m.UUID, err)
	}
	var o streamOrder
	if err := json.Unmarshal(m.Payload, &o); err != nil {
		return fmt.Errorf("message %s: %w", m.UUID, err)
	}
	return recordOrder(m.Context(), d.pool, front.Order{ID: id, Sale: o.Sale, User: o.User, Quantity: o.Quantity},
		unnumbered)
}

// errorLog logs errors until ctx is done; then the library reports the end of its connections as errors.
// It logs nothing else, because the library logs every message three times.
type errorLog struct {
	watermill.NopLogger
	ctx context.Context
}

// Error implements watermill.LoggerAdapter.
func (l errorLog) Error(what string, err error, fields watermill.LogFields) {
	if l.ctx.Err() == nil {
		slog.Error("redisstream: "+what, "err", err, "fields", fields)
	}
}

// With implements watermill.LoggerAdapter.
func (l errorLog) With(watermill.LogFields) watermill.LoggerAdapter { return l }

// evalsha is stockStream without its consumers: the cost of accepting each order with its own script
// call. Our script, which decides a whole batch in a call, is compared with it.
type evalsha struct{ *stockStream }

func newEvalsha(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openRedisStock(ctx, b, 1)
	if err != nil {
		return nil, err
	}
	return evalsha{&stockStream{redisStock: stock}}, nil
}

// Run implements front.Design.
func (evalsha) Run(ctx context.Context) error { return idle{}.Run(ctx) }
