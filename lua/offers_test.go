package lua_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// offer is reserve by the worker that offers units.
func (b *bench) offer(requests ...request) []string {
	b.t.Helper()
	b.epoch += "+"
	defer func() { b.epoch = b.epoch[:len(b.epoch)-1] }()
	return b.reserve(requests...)
}

func TestOffersAreGivenByRankAndOnlyToEntrants(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.stock = 2
	b.open()
	b.set("state", "offers")
	ann, bob, cid, dan := request{"ann", "o-ann", "k1", "1"}, request{"bob", "o-bob", "k2", "1"},
		request{"cid", "o-cid", "k3", "1"}, request{"dan", "o-dan", "k4", "1"}
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("eve")))
	require.Equal(t, []string{"reserved 1", "reserved 2", "sold-out", "sold-out"}, b.offer(ann, bob, cid, dan))
	require.Equal(t, []string{"replayed o-ann 1 1:k1", "replayed o-bob 1 2:k2", "sold-out", "sold-out"},
		b.offer(ann, bob, cid, dan), "a repeat takes nothing")
	require.Equal(t, []string{"already-purchased o-ann 1 1:k1"}, b.reserve(b.buy("ann")), "a holder learns of it")

	require.Equal(t, "released", b.end("ann", "o-ann", "k1", "1 e"))
	require.Equal(t, []string{"order-ended o-ann 1 e", "replayed o-bob 1 2:k2", "reserved 3"}, b.offer(ann, bob, cid),
		"an offer that expired is not made again, and its unit is the next one's at once")
	require.Equal(t, []string{"replayed o-cid 1 3:k3", "sold-out"}, b.offer(cid, dan))
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("eve")))
}

// Ingresses may still remember that the item is sold out, but nobody else can buy it.
func TestReturnedItemIsOfferedAtOnce(t *testing.T) {
	t.Parallel()
	b := newItemsBench(t)
	b.open()
	b.set("state", "offers")
	require.Equal(t, []string{"reserved 1", "reserved 2"}, b.offer(wants("ann", "c2"), wants("bob", "c1")))
	require.Equal(t, []string{"released"}, b.release("bob", "order-bob"))
	require.NotEmpty(t, b.field("quiet.c"))
	require.Equal(t, []string{"reserved 3"}, b.offer(wants("cid", "c1")))
}

func TestOffersFollowStateOfSale(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	require.Equal(t, []string{"reserved 1"}, b.offer(b.buy("ann")), "an open sale sells to all")
	b.set("state", "paused")
	require.Equal(t, []string{"paused"}, b.offer(b.buy("bob")))
	b.set("state", "offers")
	b.set("opens_at_ms", "99999999999999")
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("bob")))
	require.Equal(t, []string{"not-open 99999999999999"}, b.offer(b.buy("bob")))
	b.set("opens_at_ms", "0")
	b.set("closes_at_ms", "1")
	require.Equal(t, []string{"ended"}, b.offer(b.buy("bob")))
	b.set("closes_at_ms", "0")
	b.set("epoch", "2")
	require.Equal(t, []string{"stale-epoch"}, b.offer(b.buy("bob")))
	b.set("epoch", "0")
	b.epoch = "0"
	require.Equal(t, []string{"stale-epoch"}, b.offer(b.buy("bob")), "closed for a rebuild")
}

func TestOfferGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	offersOnly := func() string { return b.nextChange("open", "offers") }
	require.Equal(t, "unknown-sale", b.change("change", lua.Change, 2, "open", "offers"))
	b.open()
	require.Equal(t, "gap 1", b.change("change", lua.Change, 3, "open", "offers"))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.change("change", lua.Change, 2, "open", "offers"))
	b.epoch = "1"
	require.Equal(t, "changed", offersOnly())
	require.Equal(t, "unchanged", b.change("change", lua.Change, 2, "open", "offers"))
	require.Equal(t, "2", b.field("generation"), "ingresses that remember the sale as sold out look again")

	require.Equal(t, "changed", b.nextChange("pause"))
	require.Equal(t, "changed", b.nextChange("resume"))
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("ann")), "it is the open state of the sale")
	require.Equal(t, "changed", b.nextChange("end"))
	require.Equal(t, []string{"ended"}, b.offer(b.buy("ann")))
	require.Equal(t, "illegal ended", b.nextChange("resume"))
}

func TestPausedSaleIsOfferedWhenItIsResumed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	b.nextChange("pause")
	require.Equal(t, "changed", b.nextChange("open", "offers"))
	require.Equal(t, []string{"paused"}, b.reserve(b.buy("ann")))
	b.nextChange("resume")
	require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("ann")))
}

func (b *bench) reopen() string { return b.sayWhose("waitlist", "") }

func (b *bench) sayWhose(open, letters string) string {
	b.t.Helper()
	answer, err := lua.Waitlist.Run(b.t.Context(), b.rdb, []string{b.saleKey}, b.epoch, open, letters).Text()
	require.NoError(b.t, err)
	return b.collect("waitlist", answer)
}

// newWaitlist opens a sale of one unit with a waiting list.
func newWaitlist(t *testing.T) *bench {
	t.Helper()
	b := newBench(t)
	b.stock = 1
	require.Equal(t, "unknown-sale", b.reopen())
	b.open()
	require.Equal(t, "changed", b.nextChange("open", "waitlist"))
	require.Equal(t, []string{"reserved 1", "sold-out"}, b.reserve(request{"ann", "o-ann", "-", "1"}, b.buy("bob")))
	require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("bob")), "nothing has returned yet")
	return b
}

func TestReturnedUnitsAreOfferedToWhoWaits(t *testing.T) {
	t.Parallel()
	for name, giveBack := range map[string]func(b *bench){
		"release": func(b *bench) { require.Equal(t, []string{"released"}, b.release("ann", "o-ann")) },
		"restock": func(b *bench) { require.Equal(t, "restocked 1", b.next("restock", lua.Restock, 1, 0)) },
		"release while it is paused": func(b *bench) {
			b.nextChange("pause")
			require.Equal(t, []string{"released"}, b.release("ann", "o-ann"))
			require.Equal(t, []string{"paused"}, b.reserve(b.buy("bob")))
			b.nextChange("resume")
		},
		"restock while it is paused": func(b *bench) {
			b.nextChange("pause")
			require.Equal(t, "restocked 1", b.next("restock", lua.Restock, 1, 0))
			require.Equal(t, []string{"paused"}, b.reserve(b.buy("bob")))
			b.nextChange("resume")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newWaitlist(t)
			giveBack(b)
			require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("bob")))
			require.Equal(t, []string{"reserved 2"}, b.offer(request{"cid", "o-cid", "-", "1"}))
			require.Equal(t, []string{"offers-only"}, b.reserve(b.buy("bob")), "others wait")
			require.Equal(t, "changed", b.reopen(), "nobody does")
			require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("bob")))
		})
	}
}

func TestSaleReopensWhenNobodyWaits(t *testing.T) {
	t.Parallel()
	b := newWaitlist(t)
	require.Equal(t, "unchanged", b.reopen())
	b.nextChange("pause")
	b.nextChange("resume")
	require.Equal(t, "waitlist", b.field("state"))
	b.release("ann", "o-ann")
	before := b.field("generation")
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.reopen())
	b.epoch = "1"
	require.Equal(t, "changed", b.reopen())
	require.NotEqual(t, before, b.field("generation"))
	testkit.Eventually(t, 30*time.Second, "it is for sale", func() bool {
		return b.reserve(b.buy("bob"))[0] == "reserved 2"
	})
	b.requireAllAnswers("waitlist")

	b = newWaitlist(t)
	b.release("ann", "o-ann")
	b.nextChange("pause")
	require.Equal(t, "changed", b.reopen())
	require.Equal(t, []string{"paused"}, b.reserve(b.buy("bob")))
	b.nextChange("resume")
	require.Equal(t, "waitlist", b.field("state"))
}

// A sale whose list is closed keeps none of it.
func TestSaleOfClosedListSellsPlainly(t *testing.T) {
	t.Parallel()
	b := newWaitlist(t)
	require.Equal(t, "changed", b.sayWhose("open", ""), "also if nothing is left")
	require.Equal(t, "unchanged", b.sayWhose("open", ""))
	b.release("ann", "o-ann")
	require.Equal(t, "open", b.field("state"), "the unit is for everybody")
	b.nextChange("pause")
	b.nextChange("resume")
	require.Equal(t, "open", b.field("state"))

	b = newWaitlist(t)
	b.release("ann", "o-ann")
	b.nextChange("pause")
	require.Equal(t, "changed", b.sayWhose("open", ""))
	require.Equal(t, []string{"paused"}, b.reserve(b.buy("bob")))
	b.nextChange("resume")
	require.Equal(t, "open", b.field("state"))
}

func (b *bench) withdraw(r request) string {
	b.t.Helper()
	keys := []string{b.saleKey, b.buyers, b.ended}
	answer, err := lua.Withdraw.Run(b.t.Context(), b.rdb, keys, r.user, r.key, r.quantity).Text()
	require.NoError(b.t, err)
	return b.collect("withdraw", answer)
}

func TestWithdrawnOfferGivesNoUnit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ann, bob := request{"ann", "o-ann", "k1", "1"}, request{"bob", "o-bob", "k2", "1"}
	require.Equal(t, "unknown-sale", b.withdraw(ann))
	b.open()
	b.set("state", "offers")
	require.Equal(t, []string{"reserved 1"}, b.offer(ann))
	require.Equal(t, "made o-ann", b.withdraw(ann))
	require.Equal(t, "withdrawn", b.withdraw(request{"ann", "", "k9", "1"}), "another offer than the one that was made")
	require.Equal(t, []string{"replayed o-ann 1 1:k1"}, b.offer(ann))
	require.Equal(t, "released", b.end("ann", "o-ann", "k1", "1 e"))
	require.Equal(t, "made o-ann", b.withdraw(ann), "it has expired")

	for range 2 {
		require.Equal(t, "withdrawn", b.withdraw(bob))
		require.Equal(t, []string{"withdrawn"}, b.offer(bob), "a call that was on its way")
	}
	b.set("state", "open")
	require.Equal(t, []string{"reserved 2"}, b.reserve(b.buy("bob")), "bob may buy as all others")
	b.set("epoch", "0")
	require.Equal(t, "unknown-sale", b.withdraw(bob), "a rebuild may find the order")
	b.requireAllAnswers("withdraw")
}

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
			require.Equal(t, "restocked b1c1", b.next("restock_items", lua.RestockItems, "b", 1, 0, "c", 1, 0))
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
