package reservation

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync/atomic"
	"time"

	"stampede/internal/pause"
	"stampede/reservation/order"
)

// soldOut remembers that a sale has nothing left, so that its losers cost Redis nothing.
//
// It must not lie to a buyer: whoever holds a reservation and asks again is to be told of the order,
// not that the sale is sold out. So it remembers the buyers too, and those whose order has ended. That is bounded by
// the stock and by the orders that have ended, and it
// stays true for as long as the sale's generation stays what it is and its closing time has not come:
// with nothing left nobody can become a buyer, and every script that could change that (release,
// restock, resume, ...) raises the generation. A watcher asks for both; whatever it last saw longer
// ago than soldOutTrust counts for nothing. Units that come back are sold only when that time is over
// (quiet_ms in lua/reserve.lua), so that no buyer of one of them meets a memory that does not know of it.
//
// Only a sale without a single unit is remembered. While some are left, fewer than somebody asks for,
// another may still take them and become a buyer of whom nobody here knows.
type soldOut struct {
	generation int64
	buyers     map[uint64]struct{} // hashes; a collision only sends a loser to Redis
	checkedAt  atomic.Int64        // nanoseconds since Store.started
	asked      atomic.Bool         // since the watcher last looked
}

const (
	// A restock, resume or release is seen on every ingress after at most soldOutTrust: the watcher
	// looks every soldOutCheck, and if it cannot, what it knew expires.
	soldOutCheck = 200 * time.Millisecond
	soldOutTrust = 800 * time.Millisecond
	// A sale that nobody asked about for so many checks is forgotten.
	soldOutIdleChecks = 50
	// More buyers and ended orders than this are not remembered (about 50 bytes each): such a sale goes on asking Redis.
	soldOutBuyersMax = 4_000_000
	// soldOutRetry is how long it takes until a sale that could not be remembered is tried again.
	soldOutRetry = 5 * time.Second
)

// remembersSoldOut is true if the sale has nothing left and the user holds nothing in it.
func (q *queue) remembersSoldOut(user string) bool {
	memory := q.soldOut.Load()
	if memory == nil || q.store.sinceStart()-memory.checkedAt.Load() > int64(soldOutTrust) {
		return false
	}
	if !memory.asked.Load() {
		memory.asked.Store(true)
	}
	_, buyer := memory.buyers[maphash.String(q.store.seed, user)]
	return !buyer
}

func (s *Store) sinceStart() int64 { return int64(time.Since(s.started)) }

// learnSoldOut starts to remember that nothing is left, unless that is under way.
func (q *queue) learnSoldOut(generation int64) {
	if !q.learning.CompareAndSwap(false, true) {
		return
	}
	started := q.store.goBackground(func() {
		defer q.learning.Store(false)
		if err := q.rememberSoldOut(q.store.ctx, generation); err != nil && q.store.ctx.Err() == nil {
			q.store.O.Logger.Warn("cannot remember that a sale is sold out: its losers go on asking Redis", "sale", q.sale, "error", err)
			pause.For(soldOutRetry, q.store.ctx.Done())
		}
	})
	if !started {
		q.learning.Store(false)
	}
}

// rememberSoldOut collects the buyers, and watches the sale for as long as it stays sold out and somebody asks.
func (q *queue) rememberSoldOut(ctx context.Context, generation int64) error {
	memory := &soldOut{generation: generation, buyers: make(map[uint64]struct{})}
	p := q.place.partition
	if err := q.collectUsers(ctx, memory, q.store.Keys.Buyers(p, q.sale), 0); err != nil {
		return err
	}
	if err := q.collectUsers(ctx, memory, q.store.Keys.Ended(p, q.sale), order.FingerprintChars); err != nil {
		return err
	}
	defer q.soldOut.Store(nil)
	ticker := time.NewTicker(soldOutCheck)
	defer ticker.Stop()
	for unasked := 0; unasked < soldOutIdleChecks; unasked++ {
		at := q.store.sinceStart()
		same, err := q.stillSoldOut(ctx, generation)
		switch {
		case err == nil && !same:
			return nil
		case err == nil:
			memory.checkedAt.Store(at)
			q.soldOut.Store(memory)
		case q.store.sinceStart()-memory.checkedAt.Load() > int64(soldOutTrust):
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

// collectUsers reads all users that are fields of the hash, each behind so many other characters. Redis promises that a scan
// returns every field that is there from its beginning to its end, and a sold-out sale gains none; stillSoldOut makes sure afterwards.
func (q *queue) collectUsers(ctx context.Context, memory *soldOut, key string, behind int) error {
	n, err := q.store.Rdb.HLen(ctx, key).Result()
	if err != nil {
		return err
	}
	if n += int64(len(memory.buyers)); n > soldOutBuyersMax {
		return fmt.Errorf("%d buyers and ended orders are too many to remember", n)
	}
	var cursor uint64
	for {
		var page []string
		if page, cursor, err = q.store.Rdb.HScan(ctx, key, cursor, "", 500).Result(); err != nil {
			return err
		}
		for i := 0; i < len(page); i += 2 {
			user := page[i][min(behind, len(page[i])):]
			memory.buyers[maphash.String(q.store.seed, user)] = struct{}{}
		}
		if cursor == 0 {
			return nil
		}
	}
}

// stillSoldOut is true if nothing is left, the sale is not over, nothing can have changed since that
// generation, and the server is known to hold it.
func (q *queue) stillSoldOut(ctx context.Context, generation int64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, soldOutTrust/2)
	defer cancel()
	var sale struct {
		Left       int64 `redis:"left"`
		Generation int64 `redis:"generation"`
		Epoch      int64 `redis:"epoch"`
		ClosesAt   int64 `redis:"closes_at_ms"`
	}
	sale.Left = -1
	state, err := q.store.Inspect(ctx, q.place.partition)
	if err != nil || !state.Known {
		return false, err
	}
	pipe := q.store.Rdb.Pipeline()
	fields := pipe.HMGet(ctx, q.store.Keys.Sale(q.place.partition, q.sale), "left", "generation", "epoch", "closes_at_ms")
	now := pipe.Time(ctx)
	if _, err := pipe.Exec(ctx); err != nil {
		return false, err
	}
	if err := fields.Scan(&sale); err != nil {
		return false, err
	}
	over := sale.ClosesAt > 0 && now.Val().UnixMilli() >= sale.ClosesAt
	return sale.Left == 0 && !over && sale.Generation == generation && sale.Epoch == q.place.epoch, nil
}
