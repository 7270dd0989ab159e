package lua_test

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// newShards opens the shards of a sale, each with that stock.
func newShards(t *testing.T, stock int64, shards int) []*bench {
	t.Helper()
	opened := make([]*bench, shards)
	for shard := range opened {
		b := newBench(t)
		b.stock, b.sequence, b.shard = stock, int64(shard), strconv.Itoa(shard)+" "+strconv.Itoa(shards)+" 8"
		require.Equal(t, "opened", b.open())
		opened[shard] = b
	}
	return opened
}

var fenced = lua.FencedBy("a fence")

func (b *bench) run(script lua.FencedScript, args ...any) *redis.Cmd {
	return redis.NewScript(script.Source).Run(b.t.Context(), b.rdb, []string{b.saleKey}, args...)
}

func (b *bench) give(to int, known int64, parts any) string {
	return b.giveOf("sold", to, known, parts)
}

// giveOf gives units that are sold, or offered.
func (b *bench) giveOf(whose string, to int, known int64, parts any) string {
	b.t.Helper()
	answer, err := b.run(fenced.Give, b.epoch, to, known, parts, whose).Text()
	require.NoError(b.t, err)
	return b.collect("give", answer)
}

func (b *bench) take(totals ...any) string {
	b.t.Helper()
	answer, err := b.run(fenced.Take, append([]any{b.epoch}, totals...)...).Text()
	require.NoError(b.t, err)
	return b.collect("take", answer)
}

// count returns the answer of the script, and its numbers.
func (b *bench) count(shards int) (string, []string) {
	b.t.Helper()
	answer, err := b.run(fenced.Count, b.epoch, shards).StringSlice()
	require.NoError(b.t, err)
	return b.collect("count", answer[0]), answer[1:]
}

func (b *bench) stocks() []string { return []string{b.field("stock"), b.field("left")} }

// Every shard has each n-th place of the sale, from its own number on.
func TestShardsGiveOutDifferentPlaces(t *testing.T) {
	t.Parallel()
	var places []string
	for _, b := range newShards(t, 3, 3) {
		places = append(places, b.reserve(b.buy("ann"), b.buy("bob"))...)
		b.seen, _ = strconv.ParseInt(places[len(places)-1][len("reserved "):], 10, 64)
		places = append(places, b.reserve(b.buy("cid"))...)
		b.seen += 6 // a place that was not given out
		require.Equal(t, []string{"rewound"}, b.reserve(b.buy("dan")))
	}
	require.Equal(t, []string{
		"reserved 1", "reserved 4", "reserved 7", "reserved 2", "reserved 5", "reserved 8", "reserved 3", "reserved 6",
		"reserved 9",
	}, places)
}

func TestUnitsMoveOnce(t *testing.T) {
	t.Parallel()
	shards := newShards(t, 10, 3)
	from, to := shards[0], shards[2]
	require.Equal(t, "given 4", from.give(2, 0, 3), "a third, rounded up")
	require.Equal(t, []string{"6", "6"}, from.stocks())
	before := from.state()
	require.Equal(t, "told 4", from.give(2, 0, 3), "a repeat")
	require.Equal(t, before, from.state())
	require.Equal(t, "given 6", from.give(2, 4, 3))
	require.Equal(t, "given 4", from.give(1, 0, 1), "all that is left, to another shard")
	require.Equal(t, "told 6", from.give(2, 6, 3), "none are left")

	require.Equal(t, "taken", to.take(0, 4))
	require.Equal(t, "taken", to.take(0, 6))
	require.Equal(t, []string{"16", "16"}, to.stocks(), "of a total what was not taken before")
	require.Equal(t, "unchanged", to.take(0, 6), "a repeat")
	require.Equal(t, "unchanged", to.take(0, 4), "a late call")
	require.Equal(t, "taken", to.take(0, 6, 1, 2))
	require.Equal(t, []string{"18", "18"}, to.stocks())

	word, counted := from.count(3)
	require.Equal(t, "counted", word)
	require.Equal(t, []string{"0", "1", "0", "0", "0", "4", "0", "6", "0"}, counted)
	_, counted = to.count(3)
	require.Equal(t, []string{"18", "1", "0", "0", "6", "0", "2", "0", "0"}, counted)
}

func TestMovesGiveEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newShards(t, 10, 2)[0]
	require.Equal(t, "given 5", b.give(1, 0, 2))
	require.Equal(t, "told 5", b.give(1, 0, 2))
	require.Equal(t, "taken", b.take(1, 3))
	require.Equal(t, "unchanged", b.take(1, 3))
	b.count(2)
	for _, epoch := range []string{"2", "0"} {
		b.epoch = epoch
		word, _ := b.count(2)
		require.Equal(t, []string{"stale-epoch", "stale-epoch", "stale-epoch"}, []string{b.give(1, 5, 2), b.take(1, 9), word})
	}
	b.close()
	b.epoch = "0"
	require.Equal(t, []string{"stale-epoch", "stale-epoch"}, []string{b.give(1, 5, 2), b.take(1, 9)}, "a closed sale")
	require.NoError(t, b.rdb.Del(t.Context(), b.saleKey).Err())
	word, _ := b.count(2)
	const unknown = "unknown-sale"
	require.Equal(t, []string{unknown, unknown, unknown}, []string{b.give(1, 0, 2), b.take(1, 9), word})
	for _, script := range []string{"give", "take", "count"} {
		b.requireAllAnswers(script)
	}
}

// Units that returned to an empty shard may not be sold in another one either.
func TestUnitsThatJustReturnedAreNotGiven(t *testing.T) {
	t.Parallel()
	b := newShards(t, 1, 2)[0]
	b.reserve(request{"ann", "order-ann", "-", "1"})
	require.Equal(t, []string{"released"}, b.release("ann", "order-ann"))
	require.Equal(t, "told 0", b.give(1, 0, 2))
	_, counted := b.count(2)
	require.Equal(t, []string{"1", "2", "1"}, counted[:3], "left, generation, quiet")
	testkit.Eventually(t, 30*time.Second, "the unit is given", func() bool { return b.give(1, 0, 2) == "given 1" })
	_, counted = b.count(2)
	require.Equal(t, []string{"0", "2", "0"}, counted[:3])
}

// A rebuilt shard counts from zero, so no call of the epoch before changes anything.
func TestRebuiltShardForgetsMoves(t *testing.T) {
	t.Parallel()
	b := newShards(t, 10, 2)[1]
	require.Equal(t, "given 5", b.give(0, 0, 2))
	require.Equal(t, "taken", b.take(0, 3))
	b.close()
	require.Equal(t, "rebuilt", b.rebuilt("2", 0, 10))
	state := b.state()
	require.Equal(t, "1 2 8", b.field("shard"))
	require.Equal(t, []string{"stale-epoch", "stale-epoch"}, []string{b.give(0, 5, 2), b.take(0, 9)})
	require.Equal(t, state, b.state())
	b.epoch = "2"
	_, counted := b.count(2)
	require.Equal(t, []string{"0", "0", "0", "0"}, counted[3:])
	require.Equal(t, []string{"reserved 41"}, b.reserve(b.buy("ann")), "the sequence is 40")
	require.Equal(t, []string{"reserved 43"}, b.reserve(b.buy("bob")))
}

func TestPutBackGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	putBack := func(revision int) string { return b.change("put_back", lua.PutBack, revision) }
	require.Equal(t, "unknown-sale", putBack(2))
	b.open()
	b.reserve(b.buy("ann"))
	require.Equal(t, "unchanged", putBack(2))
	require.Equal(t, "restocked -9", b.next("restock", lua.Restock, -20, 0))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", putBack(2))
	b.epoch = "1"
	require.Equal(t, "unchanged", putBack(3))
	require.Equal(t, []string{"1", "0"}, b.stocks())
	require.Equal(t, "put-back", putBack(2))
	require.Equal(t, []string{"10", "9"}, b.stocks())
	require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("bob")), "for a second: ingresses may remember the sale")
	require.Equal(t, "unchanged", putBack(2), "a repeat")
	require.Equal(t, "restocked 0", b.change("restock", lua.Restock, 2, -20, 0), "a late call removes nothing")
	require.Equal(t, []string{"10", "9"}, b.stocks())
	require.Equal(t, "restocked 1", b.next("restock", lua.Restock, 1, 0))
	require.Equal(t, "unchanged", putBack(3), "an addition is not taken back")
	b.requireAllAnswers("put_back")
}

func TestMovesRejectInvalidNumbers(t *testing.T) {
	t.Parallel()
	b := newShards(t, 10, 2)[0]
	before := b.state()
	for _, parts := range []string{"", "0", "-1", "1.5", "nan"} {
		err := b.run(fenced.Give, b.epoch, 1, 0, parts, "sold").Err()
		require.ErrorContains(t, err, "whole number", "%q", parts)
	}
	for _, args := range [][]any{{}, {1}, {1, 2, 3}} {
		err := b.run(fenced.Take, slices.Concat([]any{b.epoch}, args)...).Err()
		require.ErrorContains(t, err, "two values for each shard", "%v", args)
	}
	require.Equal(t, before, b.state())
}

// Units that come from another shard end the pause after units have returned to an empty one.
func TestUnitsFromOtherShardsAreSoldAtOnce(t *testing.T) {
	t.Parallel()
	b := newShards(t, 1, 2)[0]
	require.Equal(t, []string{"reserved 1"}, b.reserve(b.buy("ann")))
	for field, value := range map[string]any{"left": 1, "stock": 2, "quiet_since_ms": time.Now().UnixMilli()} {
		b.set(field, value)
	}
	require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("bob")))
	require.Equal(t, "taken", b.take(1, 1))
	require.Equal(t, []string{"reserved 3"}, b.reserve(b.buy("bob")))
}

// newItemShards opens the shards of a sale with so many units of s, m and l in each.
func newItemShards(t *testing.T, shards int, stock ...int) []*bench {
	t.Helper()
	opened := make([]*bench, shards)
	for shard := range opened {
		b := newBench(t)
		b.shard = strconv.Itoa(shard) + " " + strconv.Itoa(shards) + " 8"
		args := []any{b.sale.String(), b.epoch, 1, stock[0] + stock[1] + stock[2], 0, 0, 0, 0, shard, b.shard, "s m l", 4}
		for _, n := range stock {
			args = append(args, n, 0)
		}
		keys := []string{b.saleKey, b.buyers, b.sales}
		require.Equal(t, "opened", lua.Open.Run(t.Context(), b.rdb, keys, args...).Val())
		opened[shard] = b
	}
	return opened
}

// giveItems gives units of items that are for everybody.
func (b *bench) giveItems(to int, known string, parts int, items string) string {
	b.t.Helper()
	answer, err := b.run(fenced.Give, b.epoch, to, known, parts, "sold", items).Text()
	require.NoError(b.t, err)
	return answer
}

func (b *bench) countItems(shards int) []string {
	b.t.Helper()
	answer, err := b.run(fenced.Count, b.epoch, shards, "abc").StringSlice()
	require.NoError(b.t, err)
	return answer
}

func TestUnitsOfItemsMoveOnce(t *testing.T) {
	t.Parallel()
	shards := newItemShards(t, 3, 5, 0, 3)
	from, to := shards[0], shards[2]
	require.Equal(t, "given a2", from.giveItems(2, "0", 3, "ab"), "a third, rounded up, of what there is")
	require.Equal(t, []string{"6", "3", "0", "3"}, from.left())
	require.Equal(t, "6", from.field("stock"))
	before := from.state()
	require.Equal(t, "told a2", from.giveItems(2, "0", 3, "ab"), "a repeat")
	require.Equal(t, "told a2", from.giveItems(2, "a2", 3, "b"), "none are left")
	require.Equal(t, "told a2", from.giveItems(2, "a2", 3, "d"), "the sale has no such item")
	require.Equal(t, before, from.state())
	require.Equal(t, "given a5c3", from.giveItems(2, "a2", 1, "ac"))
	require.Equal(t, []string{"0", "0", "0", "0"}, from.left())

	require.Equal(t, "taken", to.take(0, "a2"))
	require.Equal(t, []string{"10", "7", "0", "3"}, to.left())
	require.Equal(t, "taken", to.take(0, "a5c3", 1, "b4"))
	require.Equal(t, []string{"20", "10", "4", "6"}, to.left(), "of each total what was not taken before")
	require.Equal(t, "20", to.field("stock"))
	before = to.state()
	require.Equal(t, "unchanged", to.take(0, "a5c3"), "a repeat")
	require.Equal(t, "unchanged", to.take(0, "a2"), "a late call")
	require.Equal(t, "unchanged", to.take(0, "0"), "nothing was given")
	require.Equal(t, before, to.state())
	require.Equal(t, "taken", to.take(0, "a4c5"), "of one item late, and of another one not")
	require.Equal(t, "a5c5", to.field("got:0"))

	require.Equal(t, []string{
		"counted", "0", "1", "0", "0", "0", "0", "0", "0", "0", "0", "0", "0", "0", "a5c3", "0",
	}, from.countItems(3))
	require.Equal(t, []string{
		"counted", "22", "1", "0", "10", "0", "4", "0", "8", "0", "0", "a5c5", "0", "b4", "0", "0",
	}, to.countItems(3))
}

// An item whose units have just returned is not given, and others are. What comes from another shard is sold at once.
func TestReturnedUnitsOfItemStayInTheirShard(t *testing.T) {
	t.Parallel()
	shards := newItemShards(t, 2, 1, 1, 0)
	from, to := shards[0], shards[1]
	require.Equal(t, []string{"reserved 1"}, from.reserve(wants("ann", "a1")))
	require.Equal(t, []string{"released"}, from.release("ann", "order-ann"))
	require.Equal(t, "given b1", from.giveItems(1, "0", 2, "ab"))
	require.Equal(t, []string{"1", "1", "0", "0"}, from.countItems(2)[4:8], "left and quiet of a and b")

	require.Equal(t, []string{"reserved 2"}, to.reserve(wants("bob", "a1")))
	require.Equal(t, []string{"released"}, to.release("bob", "order-bob"))
	require.Equal(t, []string{"sold-out a1"}, to.reserve(wants("cid", "a1")))
	testkit.Eventually(t, 30*time.Second, "the unit is given",
		func() bool { return from.giveItems(1, "b1", 2, "a") == "given a1b1" })
	to.set("quiet.a", time.Now().UnixMilli())
	require.Equal(t, "taken", to.take(0, "a1b1"))
	require.Equal(t, []string{"reserved 4"}, to.reserve(wants("cid", "a1")))
}

// An item that a shard offers moves only to one that offers it, too, whatever becomes of other items.
func TestOfferedItemMovesToShardThatOffers(t *testing.T) {
	t.Parallel()
	shards := newItemShards(t, 2, 1, 1, 2)
	from, to := shards[0], shards[1]
	for i, b := range shards {
		require.Equal(t, "changed", b.nextChange("open", "waitlist"))
		require.Equal(t, []string{"reserved " + strconv.Itoa(i+1)}, b.reserve(wants("ann", "a1b1")))
	}
	require.Equal(t, []string{"released"}, from.release("ann", "order-ann"))
	require.Equal(t, []string{"1", "2", "1", "2", "2", "0"}, from.countItems(2)[4:10])
	require.Equal(t, "given c1", from.giveItems(1, "0", 2, "abc"), "a and b are not for everybody")
	require.Equal(t, "changed", to.sayWhose("offers", "ac"))
	require.Equal(t, "unchanged", to.sayWhose("offers", "ac"))
	require.False(t, to.rdb.HExists(t.Context(), to.saleKey, "quiet.c").Val(), "it has units of it for everybody")
	require.Equal(t, "given a1c1", from.run(fenced.Give, from.epoch, 1, "c1", 2, "offered", "ac").Val())
	require.Equal(t, "taken", to.take(0, "a1c1"))
	require.Equal(t, []string{"offers-only a1"}, to.reserve(wants("eve", "a1")))
	require.Equal(t, []string{"waitlist", "waitlist"}, []string{to.field("state"), to.field("open_state")})
	require.Equal(t, "changed", to.sayWhose("waitlist", "a"))
	require.Equal(t, []string{"sold-out a1"}, to.reserve(wants("eve", "a1")), "for a second")
}

func TestRemovedUnitsOfItemsArePutBack(t *testing.T) {
	t.Parallel()
	b := newItemShards(t, 2, 3, 3, 3)[0]
	require.Equal(t, []string{"reserved 1"}, b.reserve(wants("ann", "a1")))
	require.Equal(t, "restocked a-2c-1", b.next("restock_items", lua.RestockItems, "a", -3, 0, "c", -1, 0))
	require.Equal(t, []string{"5", "0", "3", "2"}, b.left())
	require.Equal(t, "put-back", b.change("put_back", lua.PutBack, 2))
	require.Equal(t, []string{"8", "2", "3", "3"}, b.left())
	require.Equal(t, "9", b.field("stock"))
	require.Equal(t, "unchanged", b.change("put_back", lua.PutBack, 2), "a repeat")
	require.Equal(t, "restocked 0", b.change("restock_items", lua.RestockItems, 2, "a", -3, 0), "a late call")
	require.Equal(t, []string{"sold-out a2", "reserved 3"}, b.reserve(wants("bob", "a1"), wants("cid", "c1")))
}
