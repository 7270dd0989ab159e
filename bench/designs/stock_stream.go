package designs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"stampede/bench/front"
)

// stockStream is what better tutorials end with: the same script also appends the order to a Redis
// stream, and a consumer group writes what it reads to the database. Here the consumers are
// watermill-redisstream's own subscribers, as many as are of use.
//
// What it gets right: unit and order are one step, and the order is on the disk of Redis when the
// buyer hears of it. A process that dies leaves what it was working on in the pending list, another
// one claims it, and its row is written once because the order's id is its key. Nothing is lost.
//
// How it fails: not in its answers, but in what they cost. Every buyer is a script call, and every order a
// read, a transaction and an ack of its own: each subscriber holds one message at a time. So the stream
// grows while the crowd is there, and nothing trims it. Orphans come back only after they were idle
// for a while, and an entry that cannot be read ends the subscriber that gets it.
type stockStream struct {
	*redisStock
	redisURL    string
	subscribers int
	maxIdle     time.Duration
}

const (
	// stockSubscribers is where more of them do not write faster on a few cores: Postgres syncs the
	// commits of several together.
	stockSubscribers = 16
	// Orders of a process that died are claimed after seconds instead of the library's 60 s, which
	// is long for a buyer and still hundreds of times what a transaction takes.
	stockMaxIdleMS = 5000
	// stockClaims is how often a subscriber looks for orphans while one becomes old enough.
	stockClaims    = 5
	stockTakesOver = (stockMaxIdleMS + 2*stockMaxIdleMS/stockClaims) * time.Millisecond
	// stockResend keeps a subscriber from sending one message as fast as it can while Postgres is
	// away, as the library does by default.
	stockResend = 100 * time.Millisecond
	// stockSubscriberConnections: reading, claiming, looking after consumers, and acking.
	stockSubscriberConnections = 4
	stockGroup                 = "fulfillment"
)

func newStockStream(ctx context.Context, b front.Backend) (front.Design, error) {
	subscribers, err := option(b, "subscribers", stockSubscribers)
	if err != nil {
		return nil, err
	}
	maxIdleMS, err := option(b, "max-idle-ms", stockMaxIdleMS)
	if err != nil {
		return nil, err
	}
	stock, err := openRedisStock(ctx, b, subscribers)
	if err != nil {
		return nil, err
	}
	return &stockStream{
		redisStock: stock, redisURL: b.RedisURL, subscribers: subscribers,
		maxIdle: time.Duration(maxIdleMS) * time.Millisecond,
	}, nil
}

func (d *stockStream) streamKey() string { return d.prefix + ":orders" }

// streamOrder is the payload of a message, of which the order's id is the UUID.
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

// Run implements front.Design: it is the consumer group's part in this process.
func (d *stockStream) Run(ctx context.Context) error {
	var consumers errgroup.Group
	for range d.subscribers {
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
	// The consumer's name is left to the library, which makes a random one.
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client:          client,
		ConsumerGroup:   stockGroup,
		NackResendSleep: stockResend,
		ClaimInterval:   d.maxIdle / stockClaims,
		MaxIdleTime:     d.maxIdle,
		// A read that blocks without end is not given up at shutdown either.
		DisableIndefiniteInitialBlock: true,
	}, log)
	if err != nil {
		return nil, fmt.Errorf("make a subscriber: %w", err)
	}
	return subscriber, nil
}

// consume writes what the subscriber reads until ctx ends. If the subscriber ends before that, the
// others go on.
func (d *stockStream) consume(ctx context.Context, subscriber *redisstream.Subscriber) error {
	defer func() { _ = subscriber.Close() }() // and its client
	messages, err := subscriber.Subscribe(ctx, d.streamKey())
	if err == nil {
		for m := range messages {
			if err := d.record(m); err != nil {
				slog.Warn("an order is to be written again", "order", m.UUID, "err", err)
				m.Nack()
				continue
			}
			m.Ack()
		}
		err = errors.New("the subscriber ended")
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("consume orders: %w", err)
}

// record writes one order in a transaction of its own. What fails is sent again.
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

// errorLog tells what goes wrong until ctx ends, when the library takes the end of its connections
// for an error. It tells nothing else, because the library speaks of every message three times.
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
