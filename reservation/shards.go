package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/crashpoint"
	"stampede/lua"
	"stampede/reservation/order"
)

// A sale with several shards sells out as a whole. A shard that has too few units for a request gets some from the
// others, in two steps that may each run twice, late, or never: the giver adds to a total of what it has given to the
// shard (lua/give.lua), and the shard takes what that total exceeds the one that it has got (lua/take.lua). In between
// the units are on their way, and anybody who sees that completes it.
//
// The answer "sold out" needs a proof: two counts of all shards, one after the other, that are equal and show too few
// units. Every change raises a total or a generation, or lowers the units left. So the shards were all in that state at
// the moment between the counts.
//
// In a sale with items all of that is so of each item, and units of several move in one call. A request that finds too
// few units of some items gets those from others, and then all of its lines or none in its own shard.

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

// A line is an item of a sale, by its place from 0. A sale without items has one line, which is its stock.

// shardCount is what one shard has, at one moment.
type shardCount struct {
	generation int64
	lines      []lineCount
	// given and got are the totals given to and got from each shard.
	given, got []total
}

// lineCount is what a shard has of a line.
type lineCount struct {
	left int64
	// quiet is true if the units left may not be sold yet, because they have just returned, and offered if they are
	// offered to those who wait.
	quiet, offered bool
}

func (c *shardCount) equal(other *shardCount) bool {
	return c.generation == other.generation && slices.Equal(c.lines, other.lines) &&
		slices.Equal(c.given, other.given) && slices.Equal(c.got, other.got)
}

// isBelow is true if a number that only grows is lower than in an earlier count.
func (c *shardCount) isBelow(earlier *shardCount) bool {
	below := c.generation < earlier.generation
	for other := range c.given {
		below = below || earlier.given[other].exceeds(c.given[other]) || earlier.got[other].exceeds(c.got[other])
	}
	return below
}

// unitsOf is the number of units that can be given now, of those that are sold to everybody or are offered.
func (l lineCount) unitsOf(whose whose) int64 {
	if l.quiet || l.offered != (whose == offered) {
		return 0
	}
	return l.left
}

// total is what one shard has given to another one in an epoch, as lua/give.lua writes it: units, or in a sale with
// items those of each item, as lines. The script compares it as a text.
type total string

var totalText = regexp.MustCompile(`^(\d+|([a-zA-Z]\d+)+)$`)

// units returns the units by line.
func (t total) units() iter.Seq2[int, int64] {
	if t[0] > '9' {
		return order.Lines(t).Each()
	}
	return func(yield func(int, int64) bool) {
		units, _ := strconv.ParseInt(string(t), 10, 64)
		yield(0, units)
	}
}

// exceeds is true if units of any line are in this total that are not in the other one.
func (t total) exceeds(other total) bool {
	if t == other {
		return false
	}
	var of [order.MaxItems]int64
	for line, units := range other.units() {
		of[line] = units
	}
	for line, units := range t.units() {
		if units > of[line] {
			return true
		}
	}
	return false
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

// forSale is the number of units of a line in all shards that can be sold now.
func (c *saleCount) forSale(line int) (units int64) {
	for _, shard := range c.shards {
		if shard != nil {
			units += shard.lines[line].unitsOf(sold)
		}
	}
	return units
}

// left is the number of units of a line in all shards, of a complete count.
func (c *saleCount) left(line int) (units int64) {
	for _, shard := range c.shards {
		units += shard.lines[line].left
	}
	return units
}

// generations are those of the shards, of a complete count.
func (c *saleCount) generations() (generations []int64) {
	for _, shard := range c.shards {
		generations = append(generations, shard.generation)
	}
	return generations
}

// gift is what one shard has given to another one in all. To ask for more of some items, items are their letters.
type gift struct {
	from, to int
	total    total
	items    string
}

// onTheWay returns the gifts that are not taken yet.
func (c *saleCount) onTheWay() (gifts []gift) {
	for from, giver := range c.shards {
		for to, taker := range c.shards {
			if giver != nil && taker != nil && giver.given[to].exceeds(taker.got[from]) {
				gifts = append(gifts, gift{from: from, to: to, total: giver.given[to]})
			}
		}
	}
	return gifts
}

// wishes returns the gifts that a shard asks for to get so many units of each line, with the totals as they are known.
// The richest shards are asked, and as few as possible. Each keeps a part of what it has for its own buyers.
func (c *saleCount) wishes(to int, whose whose, wanted []int64) (wishes []gift) {
	asked := make([]string, len(c.shards)) // for which items, by giver
	for line, units := range wanted {
		if here := c.shards[to]; here != nil && here.lines[line].unitsOf(whose) >= units {
			continue
		}
		for _, from := range c.givers(to, line, whose) {
			if units <= 0 {
				break
			}
			asked[from] += order.ItemLetter(line)
			units -= (c.shards[from].lines[line].left + giveParts - 1) / giveParts // lua/give.lua
		}
	}
	for from, items := range asked {
		if items != "" {
			wishes = append(wishes, gift{from, to, c.shards[from].given[to], items})
		}
	}
	return wishes
}

// givers are the other shards with such units of a line, the richest first.
func (c *saleCount) givers(to, line int, whose whose) []int {
	givers := make([]int, 0, len(c.shards))
	for from, giver := range c.shards {
		if from != to && giver != nil && giver.lines[line].unitsOf(whose) > 0 {
			givers = append(givers, from)
		}
	}
	slices.SortStableFunc(givers, func(x, y int) int {
		return cmp.Compare(c.shards[y].lines[line].left, c.shards[x].lines[line].left)
	})
	return givers
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
	args := []any{s.address.layout.Shards}
	if items := len(s.address.codes); items > 0 {
		args = append(args, order.ItemLetters(items))
	}
	answer, err := s.run(ctx, shard, func(f lua.Fenced) lua.FencedScript { return f.Count }, args...).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("count shard %d: %w", shard, err)
	}
	count, err := readCount(answer, s.address.layout.Shards, len(s.address.codes))
	if err != nil {
		return nil, fmt.Errorf("count shard %d: %w", shard, err)
	}
	return count, nil
}

// readCount reads the answer of lua/count.lua for a sale with so many shards and items.
func readCount(answer []string, shards, items int) (*shardCount, error) {
	const header = 4
	if moves := header + 2*items; answer[0] == "counted" && len(answer) == moves+2*shards {
		count, ok := &shardCount{generation: readNumber(answer[2])}, true
		lines := answer[header:moves]
		if items == 0 {
			lines = []string{answer[1], answer[3]}
		}
		for i := 0; i < len(lines); i += 2 {
			line := lineCount{left: readNumber(lines[i]), quiet: lines[i+1] == "1", offered: lines[i+1] == "2"}
			count.lines, ok = append(count.lines, line), ok && line.left >= 0
		}
		for i := moves; i < len(answer); i += 2 {
			count.given, count.got = append(count.given, total(answer[i])), append(count.got, total(answer[i+1]))
			ok = ok && totalText.MatchString(answer[i]) && totalText.MatchString(answer[i+1])
		}
		if ok && count.generation >= 0 {
			return count, nil
		}
	}
	return nil, fmt.Errorf("%w: the script answered %.50q", ErrUnavailable, answer)
}

// give asks for these gifts, and returns what came of them.
func (s shards) give(ctx context.Context, whose whose, wishes []gift) (given []gift) {
	totals := make([]total, len(wishes))
	_ = each(len(wishes), func(i int) error {
		w := wishes[i]
		args := []any{w.to, string(w.total), giveParts, string(whose)}
		if s.address.codes != nil {
			args = append(args, w.items)
		}
		answer, err := s.run(ctx, w.from, func(f lua.Fenced) lua.FencedScript { return f.Give }, args...).Text()
		if word, text, _ := strings.Cut(answer, " "); err == nil && (word == "given" || word == "told") {
			totals[i] = total(text)
		}
		return nil // without an answer the units may be on their way: the next count shows it
	})
	for i, w := range wishes {
		if totalText.MatchString(string(totals[i])) && totals[i].exceeds(w.total) {
			given = append(given, gift{from: w.from, to: w.to, total: totals[i]})
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
				args = append(args, g.from, string(g.total))
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
	of := shards{s, sale, address{layout: layout, epoch: epoch}} // the totals show whether there are items
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
		silent, gifts, wishes := count.failed, count.onTheWay(), count.wishes(q.shard, sold, q.wanted(short))
		if len(gifts) > 0 {
			count.taking.Do(func() { count.takeFail = q.shards.take(ctx, gifts) })
			silent = errors.Join(silent, count.takeFail)
		}
		switch {
		case slices.ContainsFunc(gifts, func(g gift) bool { return g.to == q.shard }):
			short = q.ask(ctx, script, short)
		case len(gifts) > 0 && silent == nil: // other shards have got units, which the next count shows
		case silent == nil && slices.ContainsFunc(short, count.hasTooFewFor):
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

// units are what a call wants of each line.
func (c *call) units() iter.Seq2[int, int64] {
	if c.lines != "" {
		return c.lines.Each()
	}
	return func(yield func(int, int64) bool) { yield(0, c.request.Quantity) }
}

// wanted is the sum of what the calls want of each line.
func (of *seller) wanted(short []*call) []int64 {
	sums := make([]int64, max(1, len(of.address.codes)))
	for _, c := range short {
		for line, units := range c.units() {
			sums[line] += units
		}
	}
	return sums
}

// hasTooFewFor is true if a call wants more of a line than all shards can sell now.
func (c *saleCount) hasTooFewFor(of *call) bool {
	for line, units := range of.units() {
		if units > c.forSale(line) {
			return true
		}
	}
	return false
}

// prove answers the calls that want more than all shards have, if a second count is equal. It returns the others.
func (q *queue) prove(ctx context.Context, first *saleCount, short []*call) []*call {
	second, err := q.countSince(ctx, first.ended)
	if err != nil || !first.equal(second) {
		return short
	}
	var left order.Items // of the items
	if codes := q.address.codes; codes != nil {
		left = linesLeft(len(codes), second.left).Named(codes)
	}
	nothingLeft := false
	short = slices.DeleteFunc(short, func(c *call) bool {
		if !second.hasTooFewFor(c) {
			return false
		}
		nothingLeft = c.nameShortage(second, q.address.codes, left) || nothingLeft
		c.done <- struct{}{} // its answer is SoldOut
		return true
	})
	if nothingLeft {
		q.learnSoldOut(second.generations())
	}
	return short
}

// nameShortage adds to the answer of a call the items that all shards have too few units of. It returns true if nothing
// is left of one of them, or of a sale without items.
func (c *call) nameShortage(count *saleCount, codes []string, left order.Items) (nothingLeft bool) {
	of := OfItems{Units: left}
	for line, units := range c.units() {
		if units <= count.forSale(line) {
			continue
		}
		nothingLeft = nothingLeft || count.left(line) == 0
		if codes != nil {
			of.Codes = append(of.Codes, codes[line])
		}
	}
	if codes != nil {
		c.answer.Of = &of
	}
	return nothingLeft
}

// linesLeft is what is left of so many items, in one text.
func linesLeft(items int, left func(item int) int64) order.Lines {
	var text []byte
	for item := range items {
		text = strconv.AppendInt(append(text, order.ItemLetter(item)...), left(item), 10)
	}
	return order.Lines(text)
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
