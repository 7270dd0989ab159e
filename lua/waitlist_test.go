package lua_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// newItemLists opens the sale of newItemsBench with a waiting list, of whose items only two of l are left.
func newItemLists(t *testing.T) *bench {
	t.Helper()
	b := newItemsBench(t)
	require.Equal(t, "changed", b.nextChange("open", "waitlist"))
	require.Equal(t, []string{"reserved 1", "reserved 2", "reserved 3"},
		b.reserve(wants("ann", "a3"), wants("bob", "b2"), wants("cid", "b1c1")))
	return b
}

// requireOffered checks that the items of these letters are offered, with one left of each, and others are sold out.
func (b *bench) requireOffered(letters string) {
	b.t.Helper()
	for _, letter := range []string{"a", "b"} {
		want := "sold-out " + letter + "0"
		if strings.Contains(letters, letter) {
			want = "offers-only " + letter + "1"
		}
		require.Equal(b.t, []string{want}, b.reserve(wants("eve", letter+"1")))
	}
	require.Equal(b.t, []string{"over-limit b2"}, b.reserve(wants("eve", "b3")))
}

// Units of an item that return when none of it are left are offered, and those of others are sold to everybody.
func TestReturnedUnitsOfItemAreOffered(t *testing.T) {
	t.Parallel()
	for name, giveBack := range map[string]func(b *bench){
		"release": func(b *bench) { require.Equal(t, []string{"released"}, b.release("cid", "order-cid")) },
		"restock": func(b *bench) {
			require.Equal(t, "restocked", b.next("restock_items", lua.RestockItems, "b", 1, 0, "c", 1, 0))
		},
		"release while it is paused": func(b *bench) {
			b.nextChange("pause")
			require.Equal(t, []string{"released"}, b.release("cid", "order-cid"))
			require.Equal(t, []string{"paused"}, b.reserve(wants("eve", "b1")))
			require.Equal(t, []string{"paused"}, b.offer(wants("eve", "b1")))
			b.nextChange("resume")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newItemLists(t)
			b.requireOffered("")
			giveBack(b)
			require.Equal(t, "waitlist", b.field("state"))
			require.Equal(t, []string{"offers-only b1", "sold-out a0", "offers-only b1", "reserved 4"},
				b.reserve(wants("eve", "b1"), wants("eve", "a1"), wants("eve", "b1c1"), wants("eve", "c1")))
			require.Equal(t, []string{"reserved 5", "sold-out b0"}, b.offer(wants("fay", "b1"), wants("gus", "b1")), "at once")
			require.Equal(t, []string{"offers-only b0"}, b.reserve(wants("hal", "b1")), "others wait")
			require.Equal(t, "unchanged", b.sayWhose("waitlist", "a"))
			require.Equal(t, "changed", b.sayWhose("waitlist", "b"))
			require.Equal(t, []string{"sold-out b0"}, b.reserve(wants("hal", "b1")), "nobody does")
		})
	}
}

// When nobody waits for an item, its units are for everybody, and those of another one stay offered.
func TestItemReopensWhenNobodyWaits(t *testing.T) {
	t.Parallel()
	b := newItemLists(t)
	b.release("ann", "order-ann")
	require.Equal(t, []string{"reserved 4"}, b.offer(wants("fay", "a2")))
	b.release("cid", "order-cid")
	b.requireOffered("ab")
	require.Equal(t, []string{"offers-only a1b1"}, b.reserve(wants("eve", "a1b1c1")), "it names all that are")
	before := b.field("generation")
	require.Equal(t, "changed", b.sayWhose("waitlist", "a"))
	require.NotEqual(t, before, b.field("generation"))
	require.Equal(t, "unchanged", b.sayWhose("waitlist", "a"))
	require.Equal(t, []string{"offers-only b1"}, b.reserve(wants("eve", "a1b1")))
	testkit.Eventually(t, 30*time.Second, "it is for sale a second after it returned", func() bool {
		return b.reserve(wants("eve", "a1"))[0] == "reserved 5"
	})

	// The list is closed, and nobody waits: what returns later is for everybody.
	require.Equal(t, "changed", b.sayWhose("open", "abc"))
	require.Equal(t, []string{"open", "open"}, []string{b.field("state"), b.field("open_state")})
	require.Equal(t, "unchanged", b.sayWhose("waitlist", "abc"), "a late call")
	require.Equal(t, []string{"released"}, b.release("eve", "order-eve"))
	require.Equal(t, []string{"sold-out a1"}, b.reserve(wants("gus", "a1")), "for a second")
}

// It is not known whether somebody waits for what a rebuild finds left.
func TestRebuiltItemsAreOffered(t *testing.T) {
	t.Parallel()
	b := newItemLists(t)
	b.close()
	keys := []string{b.saleKey, b.buyers, b.buyers + ":2", b.sales, b.ended, b.ended + ":2"}
	require.Equal(t, "rebuilt", lua.Rebuilt.Run(t.Context(), b.rdb, keys, b.sale.String(), "2", 0, 1, 9, 6, 2, 0, 0, 0, 0,
		"waitlist waitlist", ours, 0, "", "s m l", 4, 3, 0, 0, 3, 3, 2, 3, 3, 0).Val())
	b.epoch = "2"
	require.Equal(t, []string{"sold-out a0", "offers-only b3", "offers-only c3"},
		b.reserve(wants("eve", "a1"), wants("eve", "b1"), wants("eve", "c1")))
}

// Units that a shard offers are given to another one only by the worker that offers them, and that one offers them.
func TestOfferedUnitsMoveToShardThatOffers(t *testing.T) {
	t.Parallel()
	shards := newShards(t, 2, 2)
	from, to := shards[0], shards[1]
	for _, b := range shards {
		require.Equal(t, "changed", b.nextChange("open", "waitlist"))
	}
	require.Equal(t, []string{"reserved 1", "reserved 3"},
		from.reserve(request{"ann", "o-ann", "-", "1"}, request{"bob", "o-bob", "-", "1"}))
	require.Equal(t, []string{"reserved 2", "reserved 4"},
		to.reserve(request{"cid", "o-cid", "-", "1"}, request{"dan", "o-dan", "-", "1"}))
	_, counted := from.count(2)
	require.Equal(t, "0", counted[2])
	require.Equal(t, []string{"released"}, from.release("ann", "o-ann"))
	_, counted = from.count(2)
	require.Equal(t, "2", counted[2])

	require.Equal(t, "told 0", from.give(1, 0, 1), "it is not for everybody")
	require.Equal(t, "changed", to.sayWhose("offers", ""))
	require.Equal(t, "unchanged", to.sayWhose("offers", ""))
	require.Equal(t, "given 1", from.giveOf("offered", 1, 0, 1))
	require.Equal(t, "taken", to.take(0, 1))
	require.Equal(t, []string{"offers-only"}, to.reserve(to.buy("eve")))
	require.Equal(t, "changed", to.reopen())
	require.Equal(t, []string{"sold-out"}, to.reserve(to.buy("eve")), "for a second")

	// A shard with units for everybody offers none, and gives none of them away as if it did.
	require.Equal(t, "changed", from.reopen())
	require.Equal(t, "restocked 1", from.next("restock", lua.Restock, 1, 0))
	require.Equal(t, "changed", from.reopen())
	require.Equal(t, "unchanged", from.sayWhose("offers", ""))
	require.Equal(t, "told 1", from.giveOf("offered", 1, 1, 1))
}
