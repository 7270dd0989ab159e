package reservation

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

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
		if of.address.codes != nil {
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
	if err := of.collectAllUsers(ctx, 0, func(user uint64) { memory.buyers[user] = struct{}{} }); err != nil {
		return err
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

// collectAllUsers is collectUsers for all shards.
func (of *seller) collectAllUsers(ctx context.Context, known int, add func(user uint64)) error {
	for _, q := range of.queues {
		if err := q.collectUsers(ctx, known, func(user uint64) { known++; add(user) }); err != nil {
			return err
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
	return sale.Left == 0 && !over && sale.Generation == generation && sale.Epoch == q.address.epoch, nil
}

// soldItems caches which items of a sale are sold out, while others are sold, so that refusals cost Redis nothing.
//
// An item is remembered while nothing is left of it in any shard, none of it is on its way between two, and no unit has
// come to any shard: its soldItem shows that. That must be so both before and after a scan of the buyers: then all who
// hold it are known, and there was one moment at which all shards were in that state. Others who buy other items
// meanwhile are known at once if they buy from this store, and by the next scan if not: until then, such a buyer who
// asks for a sold-out item as well may hear "sold out" instead of his order. A repeat of the request that made his
// order names an item that he holds, and always gets the order.
type soldItems struct {
	seen  atomic.Pointer[soldItemsSeen] // by the last check; nil before the first
	asked atomic.Bool                   // since the last check

	mu     sync.RWMutex
	buyers map[uint64]struct{} // hashes, also of users of ended orders; after a collision Redis answers
}

// soldItemsSeen is what one check saw. It never changes.
type soldItemsSeen struct {
	at    int64                // nanoseconds since Store.started
	sold  map[int]soldItem     // the items with nothing left, by their places
	items [order.MaxItems]bool // the remembered ones
	// answers say of each sold-out item, by its place, that it is.
	answers [order.MaxItems]*OfItems
	users   int64 // how many buyers and ended orders there were
}

// soldItem is what changes when units of an item with nothing left come to any shard, or move: when units last returned
// to the shards (quiet.x in lua/reserve.lua), and the totals given and got. It stays when other items change, unlike
// the generations.
type soldItem string

const (
	// soldItemsScan is the least time between two scans of the buyers of a sale.
	soldItemsScan = 2 * time.Second
	// soldItemsRest bounds what scans of many buyers cost Redis, which are repeated while other items are sold: the pause
	// after a scan is so many times as long as the scan.
	soldItemsRest = 20
)

// remembersSoldOutItems returns the answer to a request that wants an item which is known to be sold out, for a user
// who has no order in the sale.
func (of *seller) remembersSoldOutItems(user string, wanted []int64) (answer Answer, soldOut bool) {
	memory := of.soldItems.Load()
	if memory == nil {
		return Answer{}, false
	}
	seen := memory.seen.Load()
	if seen == nil || of.store.sinceStart()-seen.at > int64(soldOutTrust) {
		return Answer{}, false
	}
	codes := of.address.codes
	for place, n := range wanted {
		switch {
		case n == 0 || !seen.items[place]:
		case answer.Of == nil:
			answer.Of = seen.answers[place]
		default:
			answer.Of = &OfItems{Units: answer.Of.Units, Codes: append(answer.Of.Codes, codes[place])}
		}
	}
	if answer.Of == nil {
		return Answer{}, false
	}
	if !memory.asked.Load() {
		memory.asked.Store(true)
	}
	hash := maphash.String(of.store.seed, user)
	memory.mu.RLock()
	_, buyer := memory.buyers[hash]
	memory.mu.RUnlock()
	answer.Verdict = SoldOut
	return answer, !buyer
}

// addBuyers adds those who got an order, now or before.
func (m *soldItems) addBuyers(seed maphash.Seed, answered []*call) {
	for _, c := range answered {
		if c.answer.Reservation.OrderID != uuid.Nil {
			m.add(maphash.String(seed, c.request.User))
		}
	}
}

func (m *soldItems) add(user uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.buyers[user] = struct{}{}
}

// rememberSoldItems watches the items of a sale while some are sold out and asked for.
func (of *seller) rememberSoldItems(ctx context.Context, _ []int64) error {
	memory := &soldItems{buyers: make(map[uint64]struct{})}
	of.soldItems.Store(memory) // before the first scan: buyers are added from now on
	defer of.soldItems.Store(nil)
	ctx, cancel := context.WithCancel(ctx)
	var scanning sync.WaitGroup
	defer scanning.Wait()
	defer cancel()
	ticker := time.NewTicker(soldOutCheck)
	defer ticker.Stop()

	var last, scanned *soldItemsSeen // by the last check, and by the one before the last scan
	scan := make(chan error, 1)
	inScan, nextScan := false, int64(0)
	for unasked := 0; unasked < soldOutIdleChecks; unasked++ {
		now, err := of.checkSoldItems(ctx)
		switch {
		case err != nil && (last == nil || of.store.sinceStart()-last.at > int64(soldOutTrust)):
			return err
		case err == nil && (now == nil || len(now.sold) == 0):
			return nil
		case err == nil:
			now.keep(last)
			if !inScan && scanned != nil {
				now.learn(scanned)
			}
			memory.seen.Store(now)
			last = now
			if due := !inScan && now.at >= nextScan; due && (now.forgets() || scanned == nil || now.users != scanned.users) {
				inScan, scanned = true, now
				scanning.Go(func() {
					memory.mu.RLock()
					known := len(memory.buyers)
					memory.mu.RUnlock()
					scan <- of.collectAllUsers(ctx, known, memory.add)
				})
			}
		}
		if memory.asked.Swap(false) {
			unasked = 0
		}
		select {
		case <-ticker.C:
		case err := <-scan:
			if err != nil {
				return err
			}
			ended := of.store.sinceStart()
			inScan, nextScan = false, ended+max(int64(soldItemsScan), soldItemsRest*(ended-scanned.at))
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// keep remembers the items that were remembered by the check before, and of which nothing has returned since.
func (s *soldItemsSeen) keep(before *soldItemsSeen) {
	if before == nil {
		return
	}
	for place, now := range s.sold {
		was, sold := before.sold[place]
		s.items[place] = before.items[place] && sold && was == now
	}
}

// learn remembers the items that were sold out before the buyers were scanned, and still are.
func (s *soldItemsSeen) learn(scanned *soldItemsSeen) {
	for place, now := range s.sold {
		was, sold := scanned.sold[place]
		s.items[place] = s.items[place] || sold && was == now
	}
}

// forgets is true if an item is sold out and not remembered.
func (s *soldItemsSeen) forgets() bool {
	for place := range s.sold {
		if !s.items[place] {
			return true
		}
	}
	return false
}

// checkSoldItems returns which items are sold out, and nil if that may not be remembered: the sale does not sell, or in
// another epoch, or on a server that is not verified.
func (of *seller) checkSoldItems(ctx context.Context) (*soldItemsSeen, error) {
	ctx, cancel := context.WithTimeout(ctx, soldOutTrust/2)
	defer cancel()
	now := &soldItemsSeen{at: of.store.sinceStart(), sold: make(map[int]soldItem)}
	shards := make([]*ShardHash, len(of.queues))
	var users atomic.Int64
	err := each(len(shards), func(shard int) (err error) {
		var its int64
		shards[shard], its, err = of.queues[shard].readItems(ctx)
		users.Add(its)
		return err
	})
	if err != nil || slices.Contains(shards, nil) {
		return nil, err
	}
	now.users = users.Load()
	codes := of.address.codes
	left := make([]int64, len(codes))
	for place := range codes {
		state, moving := []byte(nil), int64(0)
		for _, shard := range shards {
			item := shard.Items[place]
			if item.Left < 0 {
				return nil, fmt.Errorf("sale=%s: what is left of an item cannot be read", of.sale)
			}
			given, got := shard.Moved(place)
			left[place], moving = left[place]+item.Left, moving+given-got
			state = fmt.Appendf(state, "%s %d %d,", item.Quiet, given, got)
		}
		if left[place] == 0 && moving == 0 {
			now.sold[place] = soldItem(state)
		}
	}
	units := linesLeft(len(codes), func(item int) int64 { return left[item] }).Named(codes)
	for place := range now.sold {
		now.answers[place] = &OfItems{Units: units, Codes: codes[place : place+1 : place+1]}
	}
	return now, nil
}

// readItems reads a shard for checkSoldItems, and how many buyers and ended orders it has. The shard is nil if it may
// not be remembered.
func (q *queue) readItems(ctx context.Context) (shard *ShardHash, users int64, err error) {
	state, err := q.store.Inspect(ctx, q.partition)
	if err != nil || !state.Known {
		return nil, 0, err
	}
	keys := q.store.Keys
	pipe := q.store.Redis.Pipeline()
	buyers := pipe.HLen(ctx, keys.Buyers(q.partition, q.sale))
	ended := pipe.HLen(ctx, keys.Ended(q.partition, q.sale))
	fields := append([]string{"epoch", "state", "closes_at_ms"}, q.address.layout.Moves()...)
	asked := keys.AskShard(ctx, pipe, q.partition, q.sale, len(q.address.codes), fields...)
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, 0, err
	}
	hash, err := asked.Hash()
	if err != nil {
		return nil, 0, err
	}
	sells := hash.State == StateOpen || hash.State == StateWaitlist
	if hash.Epoch != q.address.epoch || !sells ||
		hash.ClosesAtMillis > 0 && state.Now.UnixMilli() >= hash.ClosesAtMillis {
		return nil, 0, nil
	}
	return &hash, buyers.Val() + ended.Val(), nil
}
