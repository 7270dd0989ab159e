package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/crashpoint"
	"stampede/lua"
)

// A sale with several shards sells out as a whole. A shard that has too few units for a request gets some from the
// others, in two steps that may each run twice, late, or never: the giver adds to a total of what it has given to the
// shard (lua/give.lua), and the shard takes what that total exceeds the one that it has got (lua/take.lua). In between
// the units are on their way, and anybody who sees that completes it.
//
// The answer "sold out" needs a proof: two counts of all shards, one after the other, that are equal and show too few
// units. Every change raises a total or a generation, or lowers the units left. So the shards were all in that state at
// the moment between the counts.

const (
	// countTimeout bounds a count of all shards.
	countTimeout = time.Second
	// fillMax bounds the counts for one batch. While many ingresses take the last units from each other, a request
	// may need several.
	fillMax = 100
	// giveParts is into how many parts a shard divides what it has left, to give one of them: one for each of the two.
	// With more parts, a shard with many buyers asks more often: four times as often with 8 of both.
	giveParts = 2
)

// errShardSilent: a shard cannot be counted, so it may have units left.
var errShardSilent = fmt.Errorf("%w: a shard of it does not answer", ErrUnavailable)

// errUnitsMove: the units left were moved between the shards during each of many counts.
var errUnitsMove = fmt.Errorf("%w: its last units keep moving", ErrUnavailable)

// shardCount is what one shard has, at one moment.
type shardCount struct {
	left, generation int64
	// quiet is true if the units left may not be sold yet, because they have just returned, and offered if they are
	// offered to those who wait.
	quiet, offered bool
	// given and got are the totals of units given to and got from each shard.
	given, got []int64
}

func (c *shardCount) equal(other *shardCount) bool {
	return c.left == other.left && c.generation == other.generation && c.quiet == other.quiet &&
		c.offered == other.offered && slices.Equal(c.given, other.given) && slices.Equal(c.got, other.got)
}

// isBelow is true if a number that only grows is lower than in an earlier count.
func (c *shardCount) isBelow(earlier *shardCount) bool {
	below := c.generation < earlier.generation
	for other := range c.given {
		below = below || c.given[other] < earlier.given[other] || c.got[other] < earlier.got[other]
	}
	return below
}

// forSale is the number of units that can be sold or given now.
func (c *shardCount) forSale() int64 { return c.unitsOf(sold) }

// unitsOf is the number of units that can be given now, of those that are sold to everybody or are offered.
func (c *shardCount) unitsOf(whose whose) int64 {
	if c.quiet || c.offered != (whose == offered) {
		return 0
	}
	return c.left
}

// whose says whom units are for, as lua/give.lua has it.
type whose string

const (
	sold    whose = "sold"
	offered whose = "offered"
)

// saleCount is a count of all shards of a sale.
type saleCount struct {
	ended  time.Time
	shards []*shardCount // nil for a shard that did not answer
	failed error         // why it did not

	// Those who share the count take the units on their way once.
	taking   sync.Once
	takeFail error
}

// equal is true if both counts are complete and show the same.
func (c *saleCount) equal(other *saleCount) bool {
	return c.failed == nil && other.failed == nil && slices.EqualFunc(c.shards, other.shards, (*shardCount).equal)
}

// forSale is the number of units in all shards that can be sold now.
func (c *saleCount) forSale() (units int64) {
	for _, shard := range c.shards {
		if shard != nil {
			units += shard.forSale()
		}
	}
	return units
}

// soldOut returns the generations of the shards if the sale has nothing left.
func (c *saleCount) soldOut() (generations []int64, ok bool) {
	for _, shard := range c.shards {
		if shard.left > 0 {
			return nil, false
		}
		generations = append(generations, shard.generation)
	}
	return generations, true
}

// gift is what one shard has given to another one in all.
type gift struct {
	from, to int
	total    int64
}

// onTheWay returns the gifts that are not taken yet.
func (c *saleCount) onTheWay() (gifts []gift) {
	for from, giver := range c.shards {
		for to, taker := range c.shards {
			if giver != nil && taker != nil && giver.given[to] > taker.got[from] {
				gifts = append(gifts, gift{from, to, giver.given[to]})
			}
		}
	}
	return gifts
}

// wishes returns the gifts that a shard asks for to get so many units, with the totals as they are known. The richest
// shards are asked, and as few as possible. Each keeps a part of what it has for its own buyers.
func (c *saleCount) wishes(to int, whose whose, wanted int64) (wishes []gift) {
	givers := make([]int, 0, len(c.shards))
	for from, giver := range c.shards {
		if from != to && giver != nil && giver.unitsOf(whose) > 0 {
			givers = append(givers, from)
		}
	}
	slices.SortStableFunc(givers, func(x, y int) int { return cmp.Compare(c.shards[y].left, c.shards[x].left) })
	for _, from := range givers {
		if wanted <= 0 {
			break
		}
		giver := c.shards[from]
		wishes = append(wishes, gift{from, to, giver.given[to]})
		wanted -= (giver.left + giveParts - 1) / giveParts // lua/give.lua
	}
	return wishes
}

// shards are the shards of a sale in one epoch.
type shards struct {
	store   *Store
	sale    uuid.UUID
	address address
}

// count counts all shards.
func (s shards) count(ctx context.Context) *saleCount {
	count := &saleCount{shards: make([]*shardCount, s.address.layout.Shards)}
	count.failed = each(len(count.shards), func(shard int) (err error) {
		count.shards[shard], err = s.countShard(ctx, shard)
		return err
	})
	count.ended = time.Now()
	return count
}

func (s shards) countShard(ctx context.Context, shard int) (*shardCount, error) {
	shards := s.address.layout.Shards
	answer, err := s.run(ctx, shard, func(f lua.Fenced) lua.FencedScript { return f.Count }, shards).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("count shard %d: %w", shard, err)
	}
	count, err := readCount(answer, shards)
	if err != nil {
		return nil, fmt.Errorf("count shard %d: %w", shard, err)
	}
	return count, nil
}

// readCount reads the answer of lua/count.lua.
func readCount(answer []string, shards int) (*shardCount, error) {
	const header = 4
	if answer[0] != "counted" || len(answer) != header+2*shards {
		return nil, fmt.Errorf("%w: the script answered %.50q", ErrUnavailable, answer)
	}
	numbers := make([]int64, len(answer))
	for i, text := range answer[1:] {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%w: the script answered %.50q", ErrUnavailable, text)
		}
		numbers[i+1] = n
	}
	count := &shardCount{
		left: numbers[1], generation: numbers[2], quiet: numbers[3] == 1, offered: numbers[3] == 2,
	}
	for i := header; i < len(numbers); i += 2 {
		count.given, count.got = append(count.given, numbers[i]), append(count.got, numbers[i+1])
	}
	return count, nil
}

// give asks for these gifts, and returns what came of them.
func (s shards) give(ctx context.Context, whose whose, wishes []gift) (given []gift) {
	totals := make([]int64, len(wishes))
	_ = each(len(wishes), func(i int) error {
		w := wishes[i]
		answer, err := s.run(ctx, w.from, func(f lua.Fenced) lua.FencedScript { return f.Give },
			w.to, w.total, giveParts, string(whose)).Text()
		if word, total, _ := strings.Cut(answer, " "); err == nil && (word == "given" || word == "told") {
			totals[i], _ = strconv.ParseInt(total, 10, 64) // 0, which takes nothing
		}
		return nil // without an answer the units may be on their way: the next count shows it
	})
	for i, w := range wishes {
		if totals[i] > w.total {
			given = append(given, gift{w.from, w.to, totals[i]})
		}
	}
	return given
}

// take completes gifts. A shard that does not answer keeps them on their way.
func (s shards) take(ctx context.Context, gifts []gift) error {
	return each(s.address.layout.Shards, func(to int) error {
		var args []any
		for _, g := range gifts {
			if g.to == to {
				args = append(args, g.from, g.total)
			}
		}
		if len(args) == 0 {
			return nil
		}
		word, err := s.run(ctx, to, func(f lua.Fenced) lua.FencedScript { return f.Take }, args...).Text()
		if err == nil && word != "taken" && word != "unchanged" {
			err = fmt.Errorf("%w: the script answered %s", ErrUnavailable, word)
		}
		if err != nil {
			return fmt.Errorf("take units in shard %d: %w", to, err)
		}
		return nil
	})
}

// run runs a script on a shard.
func (s shards) run(
	ctx context.Context, shard int, script func(lua.Fenced) lua.FencedScript, args ...any,
) *redis.Cmd {
	partition := s.address.layout.Partition(shard)
	key := s.store.Keys.Sale(partition, s.sale)
	return s.store.fenced(ctx, partition, script, key, append([]any{s.address.epoch}, args...)...)
}

// HelpUnits completes the moves of units between the shards of a sale in that epoch that were begun and not completed,
// as when an ingress has crashed. Errors wrap ErrUnavailable; what could be completed is.
func (s *Store) HelpUnits(ctx context.Context, sale uuid.UUID, layout Layout, epoch int64) error {
	if layout.Shards == 1 {
		return nil
	}
	of := shards{s, sale, address{layout: layout, epoch: epoch}}
	count := of.count(ctx)
	err := errors.Join(count.failed, of.take(ctx, count.onTheWay()))
	if err != nil && !errors.Is(err, ErrUnavailable) {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return err
}

// fill answers the calls for which this shard had too few units: with units of other shards, or with a proof that
// nothing is left. What stays undecided gets an error.
func (q *queue) fill(ctx context.Context, script *reserveScript, short []*call) {
	for range fillMax {
		count, err := q.countSince(ctx, time.Now())
		if err != nil {
			q.refuse(short, fmt.Errorf("%w: %w", ErrUnavailable, err))
			return
		}
		silent, gifts, wishes := count.failed, count.onTheWay(), count.wishes(q.shard, sold, wanted(short))
		if len(gifts) > 0 {
			count.taking.Do(func() { count.takeFail = q.shards.take(ctx, gifts) })
			silent = errors.Join(silent, count.takeFail)
		}
		switch {
		case slices.ContainsFunc(gifts, func(g gift) bool { return g.to == q.shard }):
			short = q.ask(ctx, script, short)
		case len(gifts) > 0 && silent == nil: // other shards have got units, which the next count shows
		case silent == nil && count.forSale() < needed(short):
			short = q.prove(ctx, count, short)
		case len(wishes) > 0:
			given := q.give(ctx, sold, wishes)
			crashpoint.Hit(crashpoint.UnitsGiven)
			_ = q.shards.take(ctx, given) // the next count shows what is on its way
			short = q.ask(ctx, script, short)
		case silent != nil:
			q.refuse(short, fmt.Errorf("%w: %w", errShardSilent, silent))
			return
		default: // this shard has them by now
			short = q.ask(ctx, script, short)
		}
		if len(short) == 0 {
			return
		}
		if ctx.Err() != nil {
			break
		}
	}
	q.refuse(short, errUnitsMove)
}

// wanted is the sum of the quantities of the calls.
func wanted(short []*call) (units int64) {
	for _, c := range short {
		units += c.request.Quantity
	}
	return units
}

// needed is the largest quantity of the calls.
func needed(short []*call) (units int64) {
	for _, c := range short {
		units = max(units, c.request.Quantity)
	}
	return units
}

// prove answers the calls that want more than all shards have, if a second count is equal. It returns the others.
func (q *queue) prove(ctx context.Context, first *saleCount, short []*call) []*call {
	second, err := q.countSince(ctx, first.ended)
	if err != nil || !first.equal(second) {
		return short
	}
	if generations, ok := second.soldOut(); ok {
		q.learnSoldOut(generations)
	}
	return slices.DeleteFunc(short, func(c *call) bool {
		tooMany := c.request.Quantity > second.forSale()
		if tooMany {
			c.done <- struct{}{} // its answer is SoldOut
		}
		return tooMany
	})
}

// refuse answers calls with an error. Nothing was reserved for them.
func (q *queue) refuse(calls []*call, err error) {
	for _, c := range calls {
		c.err = err
		c.done <- struct{}{}
	}
}

// countSince returns a count of all shards that began at that time or later. All queues of the sale share it.
func (of *seller) countSince(ctx context.Context, earliest time.Time) (*saleCount, error) {
	return of.counts.since(ctx, of.store, earliest, countTimeout, func(ctx context.Context) (*saleCount, error) {
		count := of.count(ctx)
		of.compare(ctx, count)
		return count, nil
	})
}

// compare compares a count with the previous one. A shard whose totals were higher was set back: it would give the same
// units again. It counts as silent, and its server is verified no more.
func (of *seller) compare(ctx context.Context, count *saleCount) {
	for shard, now := range count.shards {
		if now == nil {
			continue
		}
		if before := of.counted[shard]; before != nil && now.isBelow(before) {
			count.shards[shard] = nil
			count.failed = errors.Join(count.failed, of.store.lostOrders(ctx, of.queues[shard]))
			continue
		}
		of.counted[shard] = now
	}
}
