package lua_test

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// newItemsBench opens a sale with three units each of s, m and l, of which an order may hold four, and two of m.
func newItemsBench(t *testing.T) *bench {
	t.Helper()
	b := newBench(t)
	answer, err := lua.Open.Run(t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.sales},
		b.sale.String(), b.epoch, 1, 9, 0, 0, 0, 0, 0, "", "s m l", 4, 3, 0, 3, 2, 3, 0).Text()
	require.NoError(t, err)
	require.Equal(t, "opened", answer)
	return b
}

func wants(user, lines string) request { return request{user, "order-" + user, "-", lines} }

// left is what is left of the sale and of each item, which are the stock without what the buyers hold.
func (b *bench) left() []string {
	b.t.Helper()
	fields := []string{b.field("left"), b.field("left.a"), b.field("left.b"), b.field("left.c")}
	held := map[string]int{}
	for _, text := range b.rdb.HGetAll(b.t.Context(), b.buyers).Val() {
		for _, line := range regexp.MustCompile(`([a-c])(\d+)`).FindAllStringSubmatch(strings.Fields(text)[1], -1) {
			n, err := strconv.Atoi(line[2])
			require.NoError(b.t, err)
			held[line[1]] += n
		}
	}
	sum := 0
	for letter := range strings.SplitSeq("abc", "") {
		stock, err := strconv.Atoi(b.field("stock." + letter))
		require.NoError(b.t, err)
		require.Equal(b.t, strconv.Itoa(stock-held[letter]), b.field("left."+letter), "left of %s", letter)
		sum += stock - held[letter]
	}
	require.Equal(b.t, strconv.Itoa(sum), fields[0], "left is the sum")
	return fields
}

func TestReserveGivesEveryAnswerForItems(t *testing.T) {
	t.Parallel()
	b := newItemsBench(t)
	ann := request{"ann", "order-ann", "key-1", "a2c1"}
	require.Equal(t, []string{"reserved 1"}, b.reserve(ann))
	sameKey, otherLines := ann, ann
	sameKey.order, otherLines.order, otherLines.quantity = "order-2", "order-2", "a1c2"
	require.Equal(t, []string{
		"replayed order-ann a2c1 1:key-1", "replayed order-ann a2c1 1:key-1", "key-reused",
		"already-purchased order-ann a2c1 1:key-1", "over-limit 4", "over-limit 4", "over-limit b2",
		"sold-out a1", "sold-out a1", "reserved 2", "sold-out a0", "reserved 3", "replayed order-fay b1 3",
		"sold-out a0b1", "sold-out c2",
	}, b.reserve(
		ann, sameKey, otherLines, b.buy("ann"), wants("bob", "a5"), wants("bob", "a2b1c2"), wants("bob", "b3c1"),
		wants("cid", "a2"), wants("cid", "a2c1"), wants("dan", "a1b1"), wants("eve", "a1b1"), wants("fay", "b1"),
		wants("fay", "c1"), wants("gus", "a1b2c1"), wants("hew", "b1c3"),
	))
	require.Equal(t, []string{"3", "0", "1", "2"}, b.left())
	reply, err := b.tryReserve(wants("hal", "a1"))
	require.NoError(t, err)
	require.Equal(t, []string{"a0b1c2", "1", "sold-out a0"}, reply[1:], "what is left of each item")
	reply, err = b.tryReserve(wants("ian", "c1"))
	require.NoError(t, err)
	require.Equal(t, []string{"2", "1", "reserved 4"}, reply[1:])

	before := b.state()
	for _, wrong := range []string{
		"1", "0", "d1", "b1a1", "a1a1", "a0", "a01", "a", "a1b", "ab1", "nan", "", "a12345678",
	} {
		require.Equal(t, []string{"wrong-items", "replayed order-dan a1b1 2"},
			b.reserve(wants("joe", wrong), wants("dan", wrong+"x")), wrong)
	}
	require.Equal(t, before, b.state())
	b.nextChange("pause")
	require.Equal(t, []string{"paused", "paused"}, b.reserve(wants("joe", "a1"), wants("joe", "1")))
	b.nextChange("resume")

	// Damage affects one buyer.
	for _, held := range []string{
		"order-dan 1 2 19c", "order-dan b1a1 2 19c", "order-dan a0 2 19c", "order-dan a1b 2 19c", "order-dan 1a 2 19c",
	} {
		b.hold("dan", held)
		require.Equal(t, []string{"damaged", "replayed order-ann a2c1 1:key-1"}, b.reserve(wants("dan", "a1"), ann), held)
		require.Equal(t, []string{"damaged"}, b.release("dan", "order-dan"), held)
	}
	// Damage of an item affects those who want it.
	require.NoError(t, b.rdb.HSet(t.Context(), b.saleKey, "left.b", "many", "limit.c", "x", "left.c", 1).Err())
	require.Equal(t,
		[]string{"wrong-items", "wrong-items", "wrong-items", "sold-out a0", "replayed order-ann a2c1 1:key-1"},
		b.reserve(wants("joe", "b1"), wants("joe", "a1b1"), wants("joe", "c1"), wants("joe", "a1"), ann))
	require.NoError(t, b.rdb.HDel(t.Context(), b.saleKey, "limit").Err())
	_, err = b.tryReserve(wants("joe", "a1"))
	require.ErrorContains(t, err, "damaged")
	b.set("limit", 4)

	require.Equal(t, "changed", b.nextChange("end"))
	require.Equal(t, "retired", b.retire(b.nextRevision))
	require.Equal(t, []string{"retired", "retired"}, b.reserve(ann, wants("joe", "a1")))
	require.Equal(t, "s m l", b.field("items"))
}

func TestReserveRefusesLinesInSaleWithoutItemsAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	require.Equal(t, []string{"reserved 1", "wrong-items", "reserved 2"},
		b.reserve(b.buy("ann"), wants("bob", "a1"), b.buy("cid")))
	b.hold("dan", "order-dan a1 3 19c")
	require.Equal(t, []string{"damaged"}, b.reserve(b.buy("dan")))
	require.Equal(t, []string{"damaged"}, b.release("dan", "order-dan"))
}

func TestReleaseReturnsUnitsToEachItem(t *testing.T) {
	t.Parallel()
	b := newItemsBench(t)
	ann := request{"ann", "order-ann", "key-1", "a3c1"}
	require.Equal(t, []string{"reserved 1", "reserved 2"}, b.reserve(ann, wants("bob", "b1c2")))
	require.Equal(t, []string{"2", "0", "2", "0"}, b.left())
	require.Equal(t, "released", b.end("ann", "order-ann", "-", "a3c1 c"))
	require.Equal(t, []string{"6", "3", "2", "1"}, b.left())
	require.Equal(t, "2", b.field("generation"))
	require.Equal(t, "not-held", b.end("ann", "order-ann", "-", "a3c1 c"))
	require.Equal(t, []string{"6", "3", "2", "1"}, b.left())
	require.Zero(t, b.rdb.HExists(t.Context(), b.saleKey, "quiet_since_ms").Val())
	require.False(t, b.rdb.HExists(t.Context(), b.saleKey, "quiet.b").Val(), "there was one left")

	// The returned items are quiet, and the others are sold.
	otherLines := ann
	otherLines.quantity = "a1"
	require.Equal(t, []string{"order-ended order-ann a3c1 c", "key-reused", "sold-out a3", "reserved 3", "sold-out c1"},
		b.reserve(ann, otherLines, wants("cid", "a1b1"), wants("dan", "b1"), wants("eve", "b1c1")))
	testkit.Eventually(t, 30*time.Second, "the units are sold",
		func() bool { return b.reserve(wants("eve", "a1c1"))[0] == "reserved 4" })
	since, err := strconv.ParseInt(b.field("quiet.a"), 10, 64)
	require.NoError(t, err)
	require.GreaterOrEqual(t, b.rdb.Time(t.Context()).Val().UnixMilli()-since, int64(1000))
	b.set("quiet.b", time.Now().Add(time.Hour).UnixMilli())
	require.Equal(t, []string{"sold-out b1"}, b.reserve(wants("fay", "b1")), "the clock was set back")
	testkit.Eventually(t, 30*time.Second, "the unit is sold",
		func() bool { return b.reserve(wants("fay", "b1"))[0] == "reserved 5" })

	b.set("left.b", 3)
	before := b.state()
	require.Equal(t, []string{"damaged"}, b.release("bob", "order-bob"), "the sum would fit")
	b.hold("gus", "order-gus d1 9 19c")
	require.Equal(t, []string{"damaged"}, b.release("gus", "order-gus"), "there is no such item")
	require.NoError(t, b.rdb.HDel(t.Context(), b.buyers, "gus").Err())
	require.Equal(t, before, b.state())
}

// A call decides baskets of up to all 52 items in the order given.
func TestManyBasketsOfOneCallAreDecidedInOrder(t *testing.T) {
	t.Parallel()
	const letters, stock, ofItem, ofOrder = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", 20, 2, 66
	b := newBench(t)
	args := []any{
		b.sale.String(), b.epoch, 1, stock * len(letters), 0, 0, 0, 0, 0, "", strings.Repeat("x ", len(letters)), ofOrder,
	}
	for range letters {
		args = append(args, stock, ofItem)
	}
	require.NoError(t, lua.Open.Run(t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.sales}, args...).Err())
	random := rand.New(rand.NewPCG(1, 2))
	left, sequence := map[rune]int{}, 0
	for _, letter := range letters {
		left[letter] = stock
	}
	var requests []request
	var want, held, ends []string
	for i := range 256 {
		lines, sum, units := "", 0, map[rune]int{}
		for _, letter := range letters {
			if random.IntN(i%12+1) == 0 {
				units[letter] = 1 + random.IntN(60)/29*random.IntN(2)
				lines, sum = lines+string(letter)+strconv.Itoa(units[letter]), sum+units[letter]
			}
		}
		if lines == "" {
			lines, sum, units['c'] = "c1", 1, 1
		}
		user := fmt.Sprint("user-", i)
		requests = append(requests, wants(user, lines))
		answer := ""
		for _, letter := range letters {
			if answer == "" && units[letter] > ofItem {
				answer = fmt.Sprintf("over-limit %c%d", letter, ofItem)
			}
		}
		short := ""
		for _, letter := range letters {
			if units[letter] > left[letter] {
				short += fmt.Sprint(string(letter), left[letter])
			}
		}
		switch {
		case sum > ofOrder:
			answer = fmt.Sprint("over-limit ", ofOrder)
		case answer != "":
		case short != "":
			answer = "sold-out " + short
		default:
			for letter, n := range units {
				left[letter] -= n
			}
			sequence++
			answer = fmt.Sprint("reserved ", sequence)
			held = append(held, user, "order-"+user)
			ends = append(ends, "released")
		}
		want = append(want, answer)
	}
	require.Equal(t, want, b.reserve(requests...))
	for _, letter := range letters {
		require.Equal(t, strconv.Itoa(left[letter]), b.field("left."+string(letter)))
	}
	for range ends {
		ends = append(ends, "not-held")
	}
	require.Equal(t, ends, b.release(append(held, held...)...), "twice in a call")
	for _, letter := range letters {
		require.Equal(t, strconv.Itoa(stock), b.field("left."+string(letter)))
		quiet := b.rdb.HExists(t.Context(), b.saleKey, "quiet."+string(letter)).Val()
		require.Equal(t, left[letter] == 0, quiet, string(letter))
	}
	require.Equal(t, strconv.Itoa(stock*len(letters)), b.field("left"))
}

func TestRestockItemsGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newItemsBench(t)
	restock := func(revision int, triples ...any) string {
		return b.change("restock_items", lua.RestockItems, revision, triples...)
	}
	b.reserve(wants("ann", "a3"), wants("bob", "b1"))
	require.Equal(t, "gap 1", restock(3, "a", 1, 0))
	require.Equal(t, "restocked a2c1", restock(2, "a", 2, 0, "c", 1, 0))
	require.Equal(t, "restocked a2c1", restock(2, "a", 2, 0, "c", 1, 0), "a repeat")
	require.Equal(t, []string{"8", "2", "2", "4"}, b.left())
	require.Equal(t, []string{"12", "5", "3", "4"},
		[]string{b.field("stock"), b.field("stock.a"), b.field("stock.b"), b.field("stock.c")})
	require.Equal(t, []string{"sold-out a2", "reserved 3"}, b.reserve(wants("cid", "a1"), wants("dan", "c1")))

	before := b.state()
	require.Equal(t, "taken a3b1", restock(3, "a", -3, 3, "b", -3, 3, "c", -1, 1))
	before["sale"].(map[string]string)["revision"] = "3"
	before["sale"].(map[string]string)["restocked"] = "1 3 taken a3b1"
	require.Equal(t, before, b.state(), "all or nothing")
	require.Equal(t, "restocked a-2c-3", restock(4, "a", -2, 2, "c", -3, 3))
	require.Equal(t, []string{"2", "0", "2", "0"}, b.left())
	require.Equal(t, "restocked 0", restock(5), "only the revision")
	require.Equal(t, "unchanged", restock(4, "a", -2, 2))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", restock(6, "a", 1, 0))
	b.epoch = "1"
	before = b.state()
	for _, wrong := range [][]any{{"d", 1, 0}, {"a", "x", 0}, {"a", 1, -1}, {"a", 1}, {"a"}, {"a", 1, 0, "a", 1, 0}} {
		args := append([]any{"1", 6}, wrong...)
		require.Error(t, lua.RestockItems.Run(t.Context(), b.rdb, []string{b.saleKey}, args...).Err(), wrong)
	}
	require.Equal(t, before, b.state())
	require.NoError(t, b.rdb.Del(t.Context(), b.saleKey).Err())
	require.Equal(t, "unknown-sale", restock(2, "a", 1, 0))
	b.requireAllAnswers("restock_items")
}

func TestRebuiltSaleHasItsItems(t *testing.T) {
	t.Parallel()
	b := newItemsBench(t)
	opened := b.state()["sale"].(map[string]string)
	b.reserve(wants("ann", "a1b1"), wants("bob", "c1"))
	b.close()
	b.stage("2", "ann", "order-ann a1b1 1 19c@1")
	keys := []string{b.saleKey, b.buyers, b.buyers + ":2", b.sales, b.ended, b.ended + ":2"}
	rebuilt := func(lefts ...any) (string, error) {
		args := []any{b.sale.String(), "2", 1, 1, 9, 7, 2, 0, 0, 0, 0, "open", ours, 0, "", "s m l", 4}
		return lua.Rebuilt.Run(t.Context(), b.rdb, keys, append(args, lefts...)...).Text()
	}
	_, err := rebuilt(3, 2, 0, 3, 4, 2, 3, 3, 0)
	require.ErrorContains(t, err, "more is left")
	_, err = rebuilt(3, 2, 0, 3, "x", 2, 3, 3, 0)
	require.ErrorContains(t, err, "argument 22")
	answer, err := rebuilt(3, 2, 0, 3, 2, 2, 3, 3, 0)
	require.NoError(t, err)
	require.Equal(t, "rebuilt", answer)
	require.Equal(t, []string{"7", "2", "2", "3"}, b.left())
	is := b.state()["sale"].(map[string]string)
	for _, letter := range []string{"a", "b", "c"} {
		require.NotEmpty(t, is["quiet."+letter], "ingresses may remember items as sold out")
		delete(is, "quiet."+letter)
	}
	for field, value := range map[string]string{
		"epoch": "2", "left": "7", "left.a": "2", "left.b": "2", "generation": "2", "sequence": "2",
	} {
		opened[field] = value
	}
	require.Equal(t, opened, is)
	b.epoch = "2"
	require.Equal(t, []string{"sold-out a2"}, b.reserve(wants("cid", "a1")))
	testkit.Eventually(t, 30*time.Second, "the sale sells",
		func() bool { return b.reserve(wants("cid", "a1"))[0] == "reserved 3" })
}

// Each script that reads lines reads the same.
func TestScriptsReadLinesAlike(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(`(?s)lines_of = function(.*?)return lines, sum end`)
	read := map[string]string{}
	for _, script := range scripts(t) {
		if m := pattern.FindStringSubmatch(readHeader(t, script).body); m != nil {
			read[script] = strings.Join(strings.Fields(m[1]), " ")
		}
	}
	require.Len(t, read, 3, "reserve, release and append")
	require.Equal(t, read["reserve"], read["release"])
	require.Equal(t, read["reserve"], read["append"])
}
