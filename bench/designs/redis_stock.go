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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"golang.org/x/sync/errgroup"

	"stampede/bench/front"
	"stampede/internal/connect"
	"stampede/internal/retry"
)

// none means no verdict yet: the order was not refused, and its units are taken.
const none front.Verdict = 0

// redisStock is common to all designs that keep the stock and the buyers of a sale in Redis and the
// orders in Postgres.
type redisStock struct {
	idle
	rdb    *redis.Client
	pool   *pgxpool.Pool
	prefix string
}

// stockConnections: Redis syncs all commands that it has read at a time together, so more concurrent
// buyers make it faster, up to about this many.
const stockConnections = 64

// openRedisStock opens both, with as many connections to Postgres as the design can use.
func openRedisStock(ctx context.Context, b front.Backend, writers int) (*redisStock, error) {
	rdb, err := openRedis(b.RedisURL, stockConnections)
	if err != nil {
		return nil, err
	}
	pool, err := connect.Postgres(ctx, b.DatabaseURL, int32(writers))
	if err != nil {
		return nil, err
	}
	return &redisStock{rdb: rdb, pool: pool, prefix: b.Prefix}, nil
}

// openRedis returns a client without features that would cost a rival time or units: go-redis would
// look for push messages before every answer, and would resend commands without an answer. None of
// these designs recognizes its own retry, so a resend would take a second unit.
func openRedis(url string, connections int) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("open Redis: %w", err)
	}
	const off = -1
	o.PoolSize, o.PipelinePoolSize, o.MaxRetries = connections, off, off
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(o), nil
}

func (s *redisStock) stockKey(sale uuid.UUID) string { return s.prefix + ":stock:" + sale.String() }

func (s *redisStock) buyersKey(sale uuid.UUID) string { return s.prefix + ":buyers:" + sale.String() }

// Prepare implements front.Design: the stock is written to Redis once, and stays there when the front
// restarts.
func (s *redisStock) Prepare(ctx context.Context, sale uuid.UUID, stock int64) error {
	return s.rdb.SetNX(ctx, s.stockKey(sale), stock, 0).Err()
}

// sell takes the units of an order, and then writes it. If Postgres refuses it, the units are lost.
func (s *redisStock) sell(
	ctx context.Context, o front.Order, take func(context.Context, front.Order) (front.Verdict, error),
) (front.Verdict, error) {
	if refusal, err := take(ctx, o); refusal != none || err != nil {
		return refusal, err
	}
	if err := recordOrder(ctx, s.pool, o, unnumbered); err != nil {
		return none, err
	}
	return front.Confirmed, nil
}

// scriptVerdict converts the answer of the tutorials' scripts.
func scriptVerdict(answer int) (front.Verdict, error) {
	switch answer {
	case 0:
		return none, nil
	case 1:
		return front.SoldOut, nil
	case 2:
		return front.AlreadyPurchased, nil
	}
	return none, fmt.Errorf("the script answered %d", answer)
}

//go:embed lua/take.lua
var takeSource string

var takeScript = redis.NewScript(takeSource)

// memoryQueue is where most tutorials end: one Lua script decides in Redis who gets a unit, the order
// goes into a blocking queue in the memory of the process, the buyer is answered immediately, and one
// background thread takes orders from the queue and writes them to the database.
//
// What it gets right: the script is one step, so nothing is oversold and no user buys twice, with any
// number of processes and without a lock. A buyer waits for one round trip to Redis and not for
// Postgres, and Postgres receives no more than it can handle.
//
// How it fails: the queue exists only in memory. Orders that were answered 202 but not yet written are
// lost with the process, and so are their units: Redis has given them away, and reports forever that
// these buyers have an order. One worker writes one order at a time, so the queue grows while orders
// arrive faster; when it is full, the tutorials' version fails after it has taken the unit.
//
// Here the worker retries while Postgres is unavailable (tutorials log the error and drop the order),
// buyers wait for room in a full queue, and an orderly shutdown writes the queue first.
type memoryQueue struct {
	*redisStock
	queue chan front.Order
}

const (
	// memoryQueueWriters: tutorials use one thread to keep the orders in sequence.
	memoryQueueWriters = 1
	// memoryQueueLength is the tutorials' 1024 * 1024.
	memoryQueueLength = 1 << 20
	// memoryQueueDrain is what Kubernetes gives a process between SIGTERM and SIGKILL by default.
	memoryQueueDrain = 30 * time.Second
	// recordRetryDelay is the wait before an order is written again after an error of Postgres.
	recordRetryDelay = 100 * time.Millisecond
)

func newMemoryQueue(ctx context.Context, b front.Backend) (front.Design, error) {
	stock, err := openRedisStock(ctx, b, memoryQueueWriters)
	if err != nil {
		return nil, err
	}
	return &memoryQueue{redisStock: stock, queue: make(chan front.Order, memoryQueueLength)}, nil
}

// Buy implements front.Design.
func (d *memoryQueue) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	keys := []string{d.stockKey(o.Sale), d.buyersKey(o.Sale)}
	answer, err := takeScript.Run(ctx, d.rdb, keys, o.User, o.Quantity).Int()
	if err != nil {
		return none, fmt.Errorf("take units of the stock: %w", err)
	}
	if refusal, err := scriptVerdict(answer); refusal != none || err != nil {
		return refusal, err
	}
	select {
	case d.queue <- o:
		return front.Reserved, nil
	case <-ctx.Done():
		return none, fmt.Errorf("wait for room in the queue: %w", ctx.Err())
	}
}

// Run implements front.Design: it is the background worker. After ctx has ended it writes what is left
// in the queue.
func (d *memoryQueue) Run(ctx context.Context) error {
	writing, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(memoryQueueDrain, stop) })()
	for {
		var o front.Order
		select {
		case o = <-d.queue:
		case <-ctx.Done():
			select {
			case o = <-d.queue:
			default:
				return nil
			}
		}
		if err := d.record(writing, o); err != nil {
			return fmt.Errorf("%d orders are lost with the queue: %w", 1+len(d.queue), err)
		}
	}
}

// record retries until the order is written or refused for its values, or ctx has ended.
func (d *memoryQueue) record(ctx context.Context, o front.Order) error {
	for {
		err := recordOrder(ctx, d.pool, o, unnumbered)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return err
		case isRefused(err):
			// A retry would fail in the same way and block all other orders.
			slog.Error("order dropped: Postgres refuses its values", "order", o.ID, "user", o.User, "error", err)
			return nil
		}
		slog.Warn("writing an order failed; it will be retried", "order", o.ID, "error", err)
		if !retry.Pause(recordRetryDelay, ctx.Done()) {
			return err
		}
	}
}

// isRefused reports whether Postgres will never accept these values: classes 22 (data exception) and 23
// (integrity constraint violation).
func isRefused(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && (refusal.Code[:2] == "22" || refusal.Code[:2] == "23")
}

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
