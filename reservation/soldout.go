package reservation

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync/atomic"
	"time"

	"stampede/internal/retry"
	"stampede/reservation/order"
)

// soldOut caches that a sale is sold out in all its shards, so that refusals cost Redis nothing.
//
// A buyer with a reservation who retries must get the order, not "sold out". So the cache contains
// the buyers and the users of ended orders, bounded by the stock and the number of ended orders. It
// is valid while the generation of each shard is unchanged and before the closing time: with nothing left
// there are no new buyers, and every script that could change that (release, restock, resume, ...)
// raises the generation. A watcher checks both; a check older than soldOutTrust does not count.
// Returned units are sold only after that time (quiet_ms in lua/reserve.lua), so their buyers never
// get the answer of an outdated cache.
//
// Only a sale without any units is cached. While a few are left, another buyer may take them.
type soldOut struct {
	generations []int64             // by shard
	buyers      map[uint64]struct{} // hashes; after a collision Redis answers
	checkedAt   atomic.Int64        // nanoseconds since Store.started
	asked       atomic.Bool         // since the watcher's last check
}

const (
	// A restock, resume or release takes effect on every ingress within soldOutTrust: the watcher
	// checks every soldOutCheck, and without a check the cache expires.
	soldOutCheck = 200 * time.Millisecond
	soldOutTrust = 800 * time.Millisecond
	// A sale without requests for this many checks is dropped.
	soldOutIdleChecks = 50
	// Sales with more buyers and ended orders (about 50 bytes each) are not cached: Redis answers.
	soldOutBuyersMax = 4_000_000
	// soldOutRetry is the pause after a sale could not be cached.
	soldOutRetry = 5 * time.Second
)

// remembersSoldOut is true if the cache says that the sale has nothing left and the user has no order in it.
func (of *seller) remembersSoldOut(user string) bool {
	memory := of.soldOut.Load()
	if memory == nil || of.store.sinceStart()-memory.checkedAt.Load() > int64(soldOutTrust) {
		return false
	}
	if !memory.asked.Load() {
		memory.asked.Store(true)
	}
	_, buyer := memory.buyers[maphash.String(of.store.seed, user)]
	return !buyer
}

// sinceStart is a time in nanoseconds. It takes half of what time.Now takes.
func (s *Store) sinceStart() int64 { return int64(time.Since(s.started)) }

// learnSoldOut starts to cache that nothing is left, unless that is in progress. The generations are those of the
// shards.
func (of *seller) learnSoldOut(generations []int64) {
	if !of.learning.CompareAndSwap(false, true) {
		return
	}
	started := of.store.goBackground(func() {
		defer of.learning.Store(false)
		remember := of.rememberSoldOut
		if of.place.codes != nil {
			remember = of.rememberSoldItems
		}
		if err := remember(of.store.ctx, generations); err != nil && of.store.ctx.Err() == nil {
			of.store.Logger.Warn(
				"cannot cache that a sale is sold out: all its requests go to Redis", "sale", of.sale, "error", err,
			)
			retry.Pause(soldOutRetry, of.store.ctx.Done())
		}
	})
	if !started {
		of.learning.Store(false)
	}
}

// rememberSoldOut collects the buyers, and watches the sale while it stays sold out and gets
// requests.
func (of *seller) rememberSoldOut(ctx context.Context, generations []int64) error {
	memory := &soldOut{generations: generations, buyers: make(map[uint64]struct{})}
	for _, q := range of.queues {
		err := q.collectUsers(ctx, len(memory.buyers), func(user uint64) { memory.buyers[user] = struct{}{} })
		if err != nil {
			return err
		}
	}
	defer of.soldOut.Store(nil)
	ticker := time.NewTicker(soldOutCheck)
	defer ticker.Stop()
	for unasked := 0; unasked < soldOutIdleChecks; unasked++ {
		at := of.store.sinceStart()
		same, err := of.stillSoldOut(ctx, generations)
		switch {
		case err == nil && !same:
			return nil
		case err == nil:
			memory.checkedAt.Store(at)
			of.soldOut.Store(memory)
		case of.store.sinceStart()-memory.checkedAt.Load() > int64(soldOutTrust):
			return err
		}
		if memory.asked.Swap(false) {
			unasked = 0
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// collectUsers calls add with the hashes of all buyers of a shard, and of the users of its ended orders, if they and
// those known are not too many.
func (q *queue) collectUsers(ctx context.Context, known int, add func(user uint64)) error {
	keys := q.store.Keys
	if err := q.collectFields(ctx, keys.Buyers(q.partition, q.sale), 0, known, add); err != nil {
		return err
	}
	return q.collectFields(ctx, keys.Ended(q.partition, q.sale), order.FingerprintChars, known, add)
}

// collectFields reads all users from the fields of the hash, which are a prefix of prefixLen
// characters and the user. A scan returns every field that exists from its begin to its end, and a
// sold-out sale gains none; stillSoldOut checks that afterwards.
func (q *queue) collectFields(
	ctx context.Context, key string, prefixLen, known int, add func(user uint64),
) error {
	n, err := q.store.Redis.HLen(ctx, key).Result()
	if err != nil {
		return err
	}
	if n += int64(known); n > soldOutBuyersMax {
		return fmt.Errorf("%d buyers and ended orders are too many to cache", n)
	}
	var cursor uint64
	for {
		var page []string
		if page, cursor, err = q.store.Redis.HScan(ctx, key, cursor, "", 500).Result(); err != nil {
			return err
		}
		for i := 0; i < len(page); i += 2 {
			user := page[i][min(prefixLen, len(page[i])):]
			add(maphash.String(q.store.seed, user))
		}
		if cursor == 0 {
			return nil
		}
	}
}

// stillSoldOut is true if nothing is left in any shard, the sale has not closed, the generations are the same, and the
// servers are verified.
func (of *seller) stillSoldOut(ctx context.Context, generations []int64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, soldOutTrust/2)
	defer cancel()
	var changed atomic.Bool
	err := each(len(of.queues), func(shard int) error {
		same, err := of.queues[shard].stillSoldOut(ctx, generations[shard])
		if err == nil && !same {
			changed.Store(true)
		}
		return err
	})
	if changed.Load() {
		return false, nil
	}
	return err == nil, err
}

func (q *queue) stillSoldOut(ctx context.Context, generation int64) (bool, error) {
	state, err := q.store.Inspect(ctx, q.partition)
	if err != nil || !state.Known {
		return false, err
	}
	sale, err := q.store.Keys.AskShard(ctx, q.store.Redis, q.partition, q.sale, 0,
		"left", "generation", "epoch", "closes_at_ms").Hash()
	if err != nil {
		return false, err
	}
	over := sale.ClosesAtMillis > 0 && state.Now.UnixMilli() >= sale.ClosesAtMillis
	return sale.Left == 0 && !over && sale.Generation == generation && sale.Epoch == q.place.epoch, nil
}
