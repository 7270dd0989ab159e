package designs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"stampede/bench/front"
	"stampede/internal/retry"
)

// memoryQueue is where most tutorials end: one Lua script decides in Redis who gets a unit, the
// order goes into a blocking queue in the memory of the process, the buyer is answered at once, and
// one background thread takes orders from the queue and writes them to the database.
//
// What it gets right: the script is one step, so nothing is oversold and nobody buys twice, with any
// number of processes and without a lock. A buyer waits for one round trip to Redis and not for
// Postgres, which is given no more than it can carry.
//
// How it fails: the queue is nothing but memory. Whoever was answered 202 and not written yet is
// gone with the process, and so is the unit: Redis has given it away, and will tell that buyer ever after
// that they have an order. One worker writes one order at a time, so the queue is as long as the crowd is
// faster than that; when it is full the tutorials' version fails after the unit was taken.
//
// Here the worker tries again while Postgres is away (tutorials log the error and drop the order),
// buyers wait for a place when the queue is full, and an orderly shutdown writes what is queued first.
type memoryQueue struct {
	*redisStock
	queue chan front.Order
}

const (
	// memoryQueueWriters: one thread is what keeps the orders in line, say the tutorials.
	memoryQueueWriters = 1
	// memoryQueueLength is what tutorials take: 1024 * 1024.
	memoryQueueLength = 1 << 20
	// memoryQueueDrain is what Kubernetes gives a process between SIGTERM and SIGKILL by default.
	memoryQueueDrain = 30 * time.Second
	// recordAgain is how long to wait for a Postgres that did not take an order.
	recordAgain = 100 * time.Millisecond
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
		return none, fmt.Errorf("wait for a place in the queue: %w", ctx.Err())
	}
}

// Run implements front.Design: it is the background worker. When ctx has ended it writes what is left
// in the queue.
func (d *memoryQueue) Run(ctx context.Context) error {
	writing, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(memoryQueueDrain, giveUp) })()
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

// record writes the order, however long Postgres is away, and fails only when ctx has ended.
func (d *memoryQueue) record(ctx context.Context, o front.Order) error {
	for {
		err := recordOrder(ctx, d.pool, o, unnumbered)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return err
		case isRefused(err):
			// Trying again would hold up all others for ever.
			slog.Error("an order is dropped", "order", o.ID, "user", o.User, "err", err)
			return nil
		}
		slog.Warn("an order is to be written again", "order", o.ID, "err", err)
		if !retry.Pause(recordAgain, ctx.Done()) {
			return err
		}
	}
}

// isRefused tells whether Postgres will never take these values: classes 22 (data exception) and 23
// (integrity constraint violation).
func isRefused(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && (refusal.Code[:2] == "22" || refusal.Code[:2] == "23")
}
