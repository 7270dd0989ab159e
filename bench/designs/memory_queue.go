package designs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"

	"stampede/bench/front"
	"stampede/internal/retry"
)

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
