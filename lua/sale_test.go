package lua_test

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// bench is one sale in Redis and the scripts to run on it. It collects the answers of each script, so
// that a test can check that it has seen every answer in the header.
type bench struct {
	t                   *testing.T
	rdb                 redis.UniversalClient
	sale                uuid.UUID
	saleKey, buyers     string
	orders, sales       string
	ended               string
	epoch               string
	mu                  sync.Mutex
	answers             map[string][]string
	closesAt, opensAt   int64
	stock, perOrder     int64
	nextRevision, order int
	seen, sequence      int64
	shard               string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	keys := testkit.Keys(t)
	sale := uuid.Must(uuid.NewV7())
	return &bench{
		t: t, rdb: testkit.Redis(t), sale: sale,
		saleKey: keys.Sale(0, sale), buyers: keys.Buyers(0, sale), orders: keys.Orders(0), sales: keys.Sales(0),
		ended: keys.Ended(0, sale),
		epoch: "1", answers: map[string][]string{}, stock: 10, perOrder: 2, nextRevision: 2,
	}
}

// newBenchOnOwnRedis is for tests that change the settings of their server.
func newBenchOnOwnRedis(t *testing.T) *bench {
	t.Helper()
	options, err := redis.ParseURL(testkit.OwnRedis(t).URL)
	require.NoError(t, err)
	b := newBench(t)
	b.rdb = redis.NewClient(options)
	t.Cleanup(func() { _ = b.rdb.Close() })
	return b
}

func (b *bench) collect(script, answer string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	word, _, _ := strings.Cut(answer, " ")
	b.answers[script] = append(b.answers[script], word)
	return answer
}

// requireAllAnswers compares the collected answers of a script with its header.
func (b *bench) requireAllAnswers(script string) {
	b.t.Helper()
	collected := slices.Compact(slices.Sorted(slices.Values(b.answers[script])))
	require.ElementsMatch(b.t, readHeader(b.t, script).answers, collected, script)
}

func (b *bench) open() string {
	b.t.Helper()
	answer, err := lua.Open.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.sales},
		b.sale.String(), b.epoch, 1, b.stock, b.perOrder, b.opensAt, b.closesAt, 0, b.sequence, b.shard).Text()
	require.NoError(b.t, err)
	return b.collect("open", answer)
}

// change runs a script that makes a revision of the sale.
func (b *bench) change(name string, script *redis.Script, revision int, more ...any) string {
	b.t.Helper()
	args := append([]any{b.epoch, revision}, more...)
	answer, err := script.Run(b.t.Context(), b.rdb, []string{b.saleKey}, args...).Text()
	require.NoError(b.t, err)
	return b.collect(name, answer)
}

// next runs such a script with the next revision.
func (b *bench) next(name string, script *redis.Script, more ...any) string {
	b.t.Helper()
	b.nextRevision++
	return b.change(name, script, b.nextRevision-1, more...)
}

// nextChange makes the next revision by lua/change.lua.
func (b *bench) nextChange(change string, more ...any) string {
	b.t.Helper()
	return b.next("change", lua.Change, append([]any{change}, more...)...)
}

type request struct {
	user, order, key, quantity string
}

func (b *bench) buy(user string) request {
	b.order++
	return request{user, fmt.Sprintf("order-%d", b.order), "-", "1"}
}

func (b *bench) tryReserve(requests ...request) ([]string, error) {
	args := []any{b.epoch, b.seen, "\x81\xa5count"}
	for _, r := range requests {
		args = append(args, r.user, r.order, r.key, r.quantity)
	}
	reply, err := lua.Reserve.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.orders, b.ended}, args...).Slice()
	texts := make([]string, len(reply))
	for i, v := range reply {
		texts[i] = fmt.Sprint(v)
	}
	return texts, err
}

// reservedAt finds the time of a reservation in an answer.
var reservedAt = regexp.MustCompile(`^(\S+ \S+ \w+ \d+) [0-9a-f]+`)

// reserve returns the answers, with the time of a reservation cut out.
func (b *bench) reserve(requests ...request) []string {
	b.t.Helper()
	reply, err := b.tryReserve(requests...)
	require.NoError(b.t, err)
	require.Len(b.t, reply, 3+len(requests))
	answers := reply[3:]
	for i, a := range answers {
		b.collect("reserve", a)
		answers[i] = reservedAt.ReplaceAllString(a, "$1")
	}
	return answers
}

func (b *bench) release(pairs ...string) []string {
	b.t.Helper()
	args := []any{b.epoch}
	for i := 0; i < len(pairs); i += 2 {
		args = append(args, pairs[i], pairs[i+1], "-", "1 c")
	}
	answers, err := lua.Release.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.ended}, args...).StringSlice()
	require.NoError(b.t, err)
	for _, a := range answers {
		b.collect("release", a)
	}
	return answers
}

func (b *bench) field(name string) string {
	b.t.Helper()
	v, err := b.rdb.HGet(b.t.Context(), b.saleKey, name).Result()
	require.NoError(b.t, err)
	return v
}

func (b *bench) set(name string, value any) {
	b.t.Helper()
	require.NoError(b.t, b.rdb.HSet(b.t.Context(), b.saleKey, name, value).Err())
}

// state is all that a script may change.
func (b *bench) state() map[string]any {
	b.t.Helper()
	ctx := b.t.Context()
	sale, err := b.rdb.HGetAll(ctx, b.saleKey).Result()
	require.NoError(b.t, err)
	buyers, err := b.rdb.HGetAll(ctx, b.buyers).Result()
	require.NoError(b.t, err)
	ended, err := b.rdb.HGetAll(ctx, b.ended).Result()
	require.NoError(b.t, err)
	return map[string]any{"sale": sale, "buyers": buyers, "ended": ended, "events": b.events()}
}

func (b *bench) events() int64 {
	b.t.Helper()
	kind, err := b.rdb.Type(b.t.Context(), b.orders).Result()
	require.NoError(b.t, err)
	if kind != "stream" {
		return 0
	}
	n, err := b.rdb.XLen(b.t.Context(), b.orders).Result()
	require.NoError(b.t, err)
	return n
}

func TestReserveGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.stock = 4

	require.Equal(t, []string{"unknown-sale", "unknown-sale"}, b.reserve(b.buy("ann"), b.buy("bob")))
	require.Equal(t, "opened", b.open())

	ann := request{"ann", "order-ann", "key-1", "1"}
	require.Equal(t, []string{"reserved 1"}, b.reserve(ann))
	require.Equal(t, []string{"replayed order-ann 1 1:key-1"}, b.reserve(ann),
		"a repeat of the same call")

	sameKey := ann
	sameKey.order = "order-ann-2"
	otherQuantity := sameKey
	otherQuantity.quantity = "2"
	require.Equal(t, []string{
		"replayed order-ann 1 1:key-1",
		"key-reused",
		"already-purchased order-ann 1 1:key-1",
		"over-limit 2",
		"reserved 2",
		"sold-out",
		"reserved 3",
		"already-purchased order-fay 1 3",
		"sold-out",
	}, b.reserve(
		sameKey, otherQuantity, b.buy("ann"),
		request{"bob", "order-bob", "-", "3"},
		request{"cid", "order-cid", "-", "2"},
		request{"dan", "order-dan", "-", "2"},
		request{"fay", "order-fay", "-", "1"},
		request{"fay", "order-fay-2", "-", "1"}, // twice in one batch
		request{"gus", "order-gus", "-", "1"},
	))
	require.Equal(t, []string{"wrong-items"}, b.reserve(request{"gus", "order-gus", "-", "a1"}))
	require.Equal(t, "0", b.field("left"))
	require.Equal(t, "3", b.field("sequence"))
	require.EqualValues(t, 2, b.events(), "an entry for each call that accepted orders")

	b.epoch = "2"
	require.Equal(t, []string{"stale-epoch"}, b.reserve(ann))
	b.epoch = "1"

	b.seen = 3
	require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("hal")), "the sale has assigned this sequence")
	b.seen = 4
	before := b.state()
	require.Equal(t, []string{"rewound", "rewound"}, b.reserve(b.buy("hal"), ann),
		"the sale has not assigned this sequence")
	require.Equal(t, before, b.state())
	b.seen = 0

	b.nextChange("pause")
	require.Equal(t, []string{"paused", "replayed order-ann 1 1:key-1"}, b.reserve(b.buy("hal"), ann),
		"a retry is recognized in any state of the sale")
	b.nextChange("resume")

	b.set("state", "offers")
	require.Equal(t, []string{"offers-only", "replayed order-ann 1 1:key-1"}, b.reserve(b.buy("hal"), ann))
	b.set("state", "open")

	opensAt := time.Now().Add(time.Hour).UnixMilli()
	b.set("opens_at_ms", opensAt)
	require.Equal(t, []string{"not-open " + strconv.FormatInt(opensAt, 10)}, b.reserve(b.buy("hal")))
	b.set("opens_at_ms", 0)

	b.set("closes_at_ms", time.Now().Add(-time.Second).UnixMilli())
	require.Equal(t, []string{"ended"}, b.reserve(b.buy("hal")))
	b.set("closes_at_ms", 0)

	require.Equal(t, []string{"released"}, b.release("ann", "order-ann"))
	b.nextChange("end")
	require.NoError(t, b.rdb.HSet(t.Context(), b.ended, "keyhal", "- 1 w").Err())
	require.Equal(t, []string{"withdrawn"}, b.reserve(request{"hal", "order-hal", "key", "1"}))
	b.hold("fay", "?")
	require.Equal(t, []string{"ended", "already-purchased order-cid 2 2", "order-ended order-ann 1 c", "damaged"},
		b.reserve(b.buy("hal"), b.buy("cid"), sameKey, b.buy("fay")))

	require.Equal(t, "retired", b.retire(b.nextRevision))
	require.Equal(t, []string{"retired", "retired", "retired", "retired"},
		b.reserve(b.buy("hal"), b.buy("cid"), sameKey, b.buy("fay")))

	b.requireAllAnswers("reserve")
}

func TestReserveRejectsInvalidInputWithoutWriting(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*bench) request{
		"quantity 0":             func(*bench) request { return request{"u", "o", "-", "0"} },
		"quantity -1":            func(*bench) request { return request{"u", "o", "-", "-1"} },
		"quantity 1.5":           func(*bench) request { return request{"u", "o", "-", "1.5"} },
		"quantity 1e2":           func(*bench) request { return request{"u", "o", "-", "1e2"} },
		"quantity 0x10":          func(*bench) request { return request{"u", "o", "-", "0x10"} },
		"quantity nan":           func(*bench) request { return request{"u", "o", "-", "nan"} },
		"quantity with blanks":   func(*bench) request { return request{"u", "o", "-", " 1 "} },
		"quantity 2^53+1":        func(*bench) request { return request{"u", "o", "-", "9007199254740993"} },
		"left is not a number":   func(b *bench) request { b.set("left", "many"); return b.buy("u") },
		"left is negative":       func(b *bench) request { b.set("left", "-1"); return b.buy("u") },
		"left is missing":        func(b *bench) request { b.rdb.HDel(b.t.Context(), b.saleKey, "left"); return b.buy("u") },
		"state is unknown":       func(b *bench) request { b.set("state", "ajar"); return b.buy("u") },
		"limit is nan":           func(b *bench) request { b.set("per_order_limit", "nan"); return b.buy("u") },
		"the stream is a string": func(b *bench) request { b.rdb.Set(b.t.Context(), b.orders, "x", 0); return b.buy("u") },
		"the stream is full": func(b *bench) request {
			b.rdb.XAdd(b.t.Context(), &redis.XAddArgs{
				Stream: b.orders, ID: "18446744073709551615-18446744073709551615",
				Values: []string{"f", "v"},
			})
			return b.buy("u")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.open()
			bad := prepare(b)
			before := b.state()
			// The bad request stands between two good ones.
			first, last := b.buy("first"), b.buy("last")
			_, err := b.tryReserve(first, bad, last)
			require.Error(t, err)
			require.Equal(t, before, b.state())
		})
	}
	t.Run("buyers are a list", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		b.open()
		require.NoError(t, b.rdb.LPush(t.Context(), b.buyers, "x").Err())
		_, err := b.tryReserve(b.buy("u"))
		require.ErrorContains(t, err, "WRONGTYPE")
		require.Equal(t, "10", b.field("left"))
		require.Zero(t, b.events())
	})
	t.Run("a value is missing", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		b.open()
		err := lua.Reserve.Run(t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.orders, b.ended},
			"1", 0, "\x81\xa5count", "user", "order", "-").Err()
		require.ErrorContains(t, err, "four values")
	})
}

func TestReserveAppendsEventsInSequence(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	b.reserve(b.buy("ann"), b.buy("bob"))
	b.reserve(b.buy("ann"), b.buy("cid"))

	entries, err := b.rdb.XRange(t.Context(), b.orders, "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 2, "one for each call that accepted orders")
	for i, users := range [][]string{{"ann", "bob"}, {"cid"}} {
		values := entries[i].Values
		var lines []string
		for _, user := range users {
			lines = append(lines, user, b.rdb.HGet(t.Context(), b.buyers, user).Val())
		}
		require.Equal(t, strings.Join(lines, "\n"), values["payload"])
		first, _, _ := strings.Cut(lines[1], " ")
		require.Equal(t, first, values["_watermill_message_uuid"])
		require.Equal(t, fmt.Sprintf("\x81\xa5count\xa1%d", len(users)), values["metadata"])
	}
}

func TestReserveAtMaxmemoryWritesNothing(t *testing.T) {
	t.Parallel()
	b := newBenchOnOwnRedis(t)
	b.open()
	before := b.state()
	require.NoError(t, b.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, err := b.tryReserve(b.buy("ann"))
	require.ErrorContains(t, err, "OOM")
	require.Equal(t, before, b.state())

	require.NoError(t, b.rdb.ConfigSet(t.Context(), "maxmemory", "0").Err())
	b.reserve(request{"ann", "order-ann", "-", "1"})
	require.NoError(t, b.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	require.Equal(t, []string{"released"}, b.release("ann", "order-ann"), "units return even when memory is full")
}

func TestOpenGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.NoError(t, b.rdb.HSet(t.Context(), b.buyers, "ann", "order-ann 1 1 1 -").Err())
	require.Equal(t, "buyers-remain", b.open())
	require.Zero(t, b.rdb.Exists(t.Context(), b.saleKey, b.sales).Val())
	require.NoError(t, b.rdb.Del(t.Context(), b.buyers).Err())

	require.Equal(t, "opened", b.open())
	require.True(t, b.rdb.SIsMember(t.Context(), b.sales, b.sale.String()).Val())
	b.reserve(b.buy("ann"))
	require.Equal(t, "unchanged", b.open())
	require.Equal(t, "9", b.field("left"), "opening again does not refill")
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.open())
	b.requireAllAnswers("open")

	for i, damaged := range []string{"", "-1", "1.5", "nan", "1e2"} {
		c := newBench(t)
		err := lua.Open.Run(t.Context(), c.rdb, []string{c.saleKey, c.buyers, c.sales}, c.sale.String(), "1", 1, damaged, 1,
			0, 0, 0, 0, "").Err()
		require.ErrorContains(t, err, "whole number", "case %d", i)
		require.Zero(t, c.rdb.Exists(t.Context(), c.saleKey, c.sales).Val())
	}
}

func TestChangeGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	for change, tc := range map[string]struct {
		prepare string // the change before, so that this one may be made
		state   string
	}{
		"pause": {state: "paused"}, "resume": {"pause", "open"}, "end": {state: "ended"},
	} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			again := func(revision int) string { return b.change("change", lua.Change, revision, change) }
			require.Equal(t, "unknown-sale", again(2))
			b.open()
			require.Equal(t, "gap 1", again(3))
			b.epoch = "2"
			require.Equal(t, "stale-epoch", again(2))
			b.epoch = "1"
			if tc.prepare != "" {
				require.Equal(t, "changed", b.nextChange(tc.prepare))
			}
			generation := b.field("generation")
			require.Equal(t, "changed", b.nextChange(change))
			require.Equal(t, tc.state, b.field("state"))
			require.NotEqual(t, generation, b.field("generation"), "ingresses that remember the sale as sold out look again")

			before := b.state()
			require.Equal(t, "unchanged", again(b.nextRevision-1))
			require.Equal(t, "illegal "+tc.state, again(b.nextRevision))
			require.Equal(t, before, b.state())
			b.requireAllAnswers("change")
		})
	}
}

// A revision of which Redis has nothing is noted, so that later ones do not wait for it.
func TestChangeNotesRevision(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	before := b.state()
	require.Equal(t, "changed", b.nextChange("note"))
	before["sale"].(map[string]string)["revision"] = "2"
	require.Equal(t, before, b.state())
	require.Equal(t, "changed", b.nextChange("pause"))
}

func TestRestockGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.Equal(t, "unknown-sale", b.change("restock", lua.Restock, 2, 10, 0))
	b.open()
	b.reserve(b.buy("ann"), b.buy("bob"))
	require.Equal(t, "gap 1", b.change("restock", lua.Restock, 3, 10, 0))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.change("restock", lua.Restock, 2, 10, 0))
	b.epoch = "1"

	require.Equal(t, "restocked 10", b.next("restock", lua.Restock, 10, 0))
	require.Equal(t, []string{"20", "18", "2"}, []string{b.field("stock"), b.field("left"), b.field("generation")})
	require.Equal(t, "restocked 10", b.change("restock", lua.Restock, 2, 10, 0), "a repeat gets the same answer")
	require.Equal(t, []string{"20", "18", "2"}, []string{b.field("stock"), b.field("left"), b.field("generation")},
		"a repeat changes nothing")
	require.Equal(t, "changed", b.nextChange("pause"))
	require.Equal(t, "restocked 10", b.change("restock", lua.Restock, 2, 10, 0), "also after another change")

	before := b.state()
	require.Equal(t, "taken 2", b.next("restock", lua.Restock, -19, 19))
	before["sale"].(map[string]string)["revision"] = "4"
	before["sale"].(map[string]string)["restocked"] = "1 4 taken 2"
	require.Equal(t, before, b.state(), "the revision is applied, and nothing else changes")
	require.Equal(t, "taken 2", b.change("restock", lua.Restock, 4, -19, 19), "a repeat gets the same answer")
	require.Equal(t, before, b.state())

	require.Equal(t, "restocked -17", b.next("restock", lua.Restock, -17, 17))
	require.Equal(t, []string{"3", "1"}, []string{b.field("stock"), b.field("left")})
	require.Equal(t, "restocked -1", b.next("restock", lua.Restock, -5, 0), "what is left, if that is enough")
	require.Equal(t, []string{"2", "0"}, []string{b.field("stock"), b.field("left")})
	require.Equal(t, "restocked 0", b.next("restock", lua.Restock, -5, 0))
	require.Equal(t, "unchanged", b.change("restock", lua.Restock, 2, 10, 0), "the stock was changed again")
	// The stock is rebuilt, and this revision was never applied to it.
	b.epoch = "2"
	b.set("epoch", "2")
	require.Equal(t, "unchanged", b.change("restock", lua.Restock, 5, -17, 17))
	b.requireAllAnswers("restock")
}

func TestReleaseGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.Equal(t, []string{"unknown-sale"}, b.release("ann", "order-ann"))
	b.open()
	b.reserve(request{"ann", "order-ann", "-", "2"}, request{"bob", "order-bob", "-", "1"})
	require.Equal(t, "7", b.field("left"))

	require.Equal(t, []string{"not-held", "released", "not-held", "not-held"},
		b.release("ann", "order-of-before", "ann", "order-ann", "ann", "order-ann", "cid", "order-cid"))
	require.Equal(t, []string{"9", "2"}, []string{b.field("left"), b.field("generation")})
	before := b.state()
	require.Equal(t, []string{"not-held"}, b.release("ann", "order-ann"), "a unit returns once")
	require.Equal(t, before, b.state())

	require.Equal(t, []string{"reserved 3"}, b.reserve(request{"ann", "order-ann-2", "-", "1"}), "the user may buy again")
	b.epoch = "2"
	require.Equal(t, []string{"stale-epoch"}, b.release("bob", "order-bob"))
	b.epoch = "1"
	b.set("left", 10)
	require.Equal(t, []string{"damaged"}, b.release("bob", "order-bob"))
	require.Equal(t, "10", b.field("left"))

	// An unreadable reservation may be this order.
	b.set("left", 5)
	for _, held := range unreadable {
		b.hold("bob", held)
		before := b.state()
		require.Equal(t, []string{"damaged"}, b.release("bob", "order-bob"), held)
		require.Equal(t, before, b.state())
	}
	for _, held := range []string{
		"order-bob 1 2 19c", "order-bob 1 2 19c:key_-1", "order-bob 1 2 19c@1",
		"order-bob 1 2 19c:key_-1@1",
	} {
		b.hold("bob", held)
		require.Equal(t, []string{"not-held", "released"}, b.release("bob", "order-of-before", "bob", "order-bob"), held)
	}
	b.requireAllAnswers("release")
}
