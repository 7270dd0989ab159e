package designs

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/redis/go-redis/v9"

	"stampede/bench/front"
)

// checkSet is the first step of most tutorials: the stock is cached in Redis to keep reads away from
// the database. SISMEMBER reports whether the user has bought, GET whether units are left; SET stores
// the remainder, SADD the buyer, and a transaction writes the order.
//
// What it gets right: refusals cost two reads in memory and nothing in Postgres, and every answer 201
// is an order that is in Postgres.
//
// How it fails: other buyers can read between its read and its write. All who read the same stock store
// the same remainder, so many orders are sold for one unit; and two concurrent requests of a user both
// find that the user has not bought. Tests with one client at a time never show it.
//
// Here it takes two round trips instead of four: a careful author sends the two reads together and the
// two writes together. That also makes the gap between them as narrow as possible.
type checkSet struct{ *redisStock }

// checkSetWriters: Postgres syncs concurrent commits together, and more writers than this are not
// faster on a few cores.
const checkSetWriters = 16

func newCheckSet(ctx context.Context, b front.Backend) (front.Design, error) {
	return openCheckSet(ctx, b)
}

func openCheckSet(ctx context.Context, b front.Backend) (*checkSet, error) {
	stock, err := openRedisStock(ctx, b, checkSetWriters)
	if err != nil {
		return nil, err
	}
	return &checkSet{stock}, nil
}

// Buy implements front.Design.
func (d *checkSet) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	return d.sell(ctx, o, d.take)
}

// take takes the units, or returns why not. It is correct only if no other buyer runs between its two
// halves.
func (d *checkSet) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	left, refusal, err := d.check(ctx, o)
	if refusal != none || err != nil {
		return refusal, err
	}
	return none, d.set(ctx, o, left-o.Quantity)
}

func (d *checkSet) check(ctx context.Context, o front.Order) (left int64, refusal front.Verdict, err error) {
	both := d.rdb.Pipeline()
	bought := both.SIsMember(ctx, d.buyersKey(o.Sale), o.User)
	stock := both.Get(ctx, d.stockKey(o.Sale))
	if _, err := both.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return 0, none, fmt.Errorf("read the stock and its buyers: %w", err)
	}
	if bought.Val() {
		return 0, front.AlreadyPurchased, nil
	}
	left, err = stock.Int64()
	switch {
	case errors.Is(err, redis.Nil), err == nil && left < o.Quantity:
		return 0, front.SoldOut, nil
	case err != nil:
		return 0, none, fmt.Errorf("read the stock: %w", err)
	}
	return left, none, nil
}

func (d *checkSet) set(ctx context.Context, o front.Order, left int64) error {
	both := d.rdb.Pipeline()
	both.Set(ctx, d.stockKey(o.Sale), left, 0)
	both.SAdd(ctx, d.buyersKey(o.Sale), o.User)
	if _, err := both.Exec(ctx); err != nil {
		return fmt.Errorf("take units of the stock: %w", err)
	}
	return nil
}

// mutex is the second step of tutorials: synchronized, a ReentrantLock, or in Go a sync.Mutex around
// the check and the write.
//
// What it gets right: one process sells exactly its stock, without any other system for it.
//
// How it fails: the mutex is in the memory of one process. With a second process, for more speed or for
// a release without downtime, each has its own mutex: they oversell as if there were none. And all
// buyers of all sales wait in one queue, for two round trips each.
//
// The lock covers only the read and the write of the stock: the order is written to Postgres after it
// is released. Tutorials that hold it during their database transaction sell a fraction of that.
type mutex struct {
	*checkSet
	mu sync.Mutex
}

func newMutex(ctx context.Context, b front.Backend) (front.Design, error) {
	unlocked, err := openCheckSet(ctx, b)
	if err != nil {
		return nil, err
	}
	return &mutex{checkSet: unlocked}, nil
}

// Buy implements front.Design.
func (d *mutex) Buy(ctx context.Context, o front.Order) (front.Verdict, error) {
	return d.sell(ctx, o, d.take)
}

func (d *mutex) take(ctx context.Context, o front.Order) (front.Verdict, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.checkSet.take(ctx, o)
}
