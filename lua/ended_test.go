package lua_test

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// end releases one order with its key and how it ended.
func (b *bench) end(user, order, key, ending string) string {
	b.t.Helper()
	answers, err := lua.Release.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.ended}, b.epoch, user, order,
		key, ending).StringSlice()
	require.NoError(b.t, err)
	require.Len(b.t, answers, 1)
	return answers[0]
}

func TestReserveRejectsKeyOfEndedOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	ann, bob := request{"ann", "order-ann", "key-1", "2"}, request{"bob", "order-bob", "key-1", "1"}
	b.reserve(ann, bob)
	require.Equal(t, "released", b.end("ann", "order-ann", "-", "2 c"), "the key is read from the reservation")
	require.Equal(t, map[string]string{"key-1ann": "order-ann 2 c"}, b.rdb.HGetAll(t.Context(), b.ended).Val())

	again := request{"ann", "order-ann-2", "key-1", "2"}
	ofAnother := request{"cid", "order-cid", "key-1", "1"}
	otherQuantity := request{"ann", "order-ann-3", "key-1", "1"}
	require.Equal(t, []string{
		"order-ended order-ann 2 c", "order-ended order-ann 2 c", "key-reused", "reserved 3",
		"replayed order-bob 1 2:key-1",
	},
		b.reserve(ann, again, otherQuantity, ofAnother, bob), "a key belongs to one buyer")
	require.Equal(t, []string{"reserved 4"}, b.reserve(request{"ann", "order-ann-4", "key-2", "1"}), "another key buys")
	require.Equal(t, []string{"order-ended order-ann 2 c", "already-purchased order-ann-4 1 4:key-2"},
		b.reserve(again, request{"ann", "order-ann-5", "key-3", "1"}), "also while the buyer holds another order")

	require.Equal(t, "released", b.end("ann", "order-ann-4", "key-2", "1 e"))
	b.nextChange("pause")
	require.Equal(t, []string{"order-ended order-ann 2 c", "order-ended order-ann-4 1 e"},
		b.reserve(again, request{"ann", "o", "key-2", "1"}), "in any state of the sale")
	b.nextChange("resume")

	// Redis has lost this order: its key comes from Postgres.
	require.Equal(t, "not-held", b.end("dan", "order-dan", "key-4", "1 r"))
	require.Equal(t, []string{"order-ended order-dan 1 r"}, b.reserve(request{"dan", "order-dan-2", "key-4", "1"}))
	// An order whose key is not recorded does not block a new order.
	require.Equal(t, "not-held", b.end("eve", "order-eve", "key-5", "-"))
	require.Equal(t, []string{"reserved 5"}, b.reserve(request{"eve", "order-eve-2", "key-5", "1"}))

	before := b.state()
	for _, damaged := range []string{"", "?", "order-ann 2", "order-ann x c", "order-ann 2 cc", "order-ann 2 c "} {
		require.NoError(t, b.rdb.HSet(t.Context(), b.ended, "key-1ann", damaged).Err())
		require.Equal(t, []string{"damaged", "order-ended order-dan 1 r"},
			b.reserve(again, request{"dan", "o", "key-4", "1"}), damaged)
	}
	require.NoError(t, b.rdb.HSet(t.Context(), b.ended, "key-1ann", "order-ann 2 c").Err())
	require.Equal(t, before, b.state())
}

// The field of an ended order is its key followed by its user, so a user id may look like the rest of
// such a field.
func TestRequestWithoutKeyMatchesNoEndedOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	require.Equal(t, "not-held", b.end("ann", "order-ann", "-key", "1 c"))
	require.Equal(t, []string{"order-ended order-ann 1 c", "reserved 1"},
		b.reserve(request{"ann", "order-ann-2", "-key", "1"}, request{"keyann", "order-keyann", "-", "1"}))
	require.Equal(t, []string{"already-purchased order-keyann 1 1"},
		b.reserve(request{"keyann", "order-keyann-2", "-", "1"}))
}

func TestUnitsReturnedToSoldOutSaleAreSoldAfterOneSecond(t *testing.T) {
	t.Parallel()
	for name, returnUnits := range map[string]func(b *bench){
		"release": func(b *bench) { require.Equal(t, []string{"released"}, b.release("ann", "order-ann")) },
		"restock": func(b *bench) { require.Equal(t, "restocked 1", b.next("restock", lua.Restock, 1, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.stock = 1
			b.open()
			b.reserve(request{"ann", "order-ann", "-", "1"})
			returnUnits(b)
			since, err := strconv.ParseInt(b.field("quiet_since_ms"), 10, 64)
			require.NoError(t, err)
			sold, tries := []string{"sold-out"}, 0
			testkit.Eventually(t, 30*time.Second, "the unit is sold", func() bool {
				reply, err := b.tryReserve(request{"bob", "order-bob", "-", "1"})
				require.NoError(t, err)
				now, err := strconv.ParseInt(reply[0], 10, 64)
				require.NoError(t, err)
				if sold = reply[3:]; sold[0] == "sold-out" {
					require.Less(t, now-since, int64(1000))
					require.Equal(t, "1", reply[1], "the unit counts as left, so no ingress remembers the sale as sold out")
					tries++
					return false
				}
				require.GreaterOrEqual(t, now-since, int64(1000))
				return true
			})
			require.Equal(t, []string{"reserved 2"}, sold)
			require.Positive(t, tries)

			// The clock of Redis was set back by an hour: the pause begins again and lasts one second.
			b.set("left", 1)
			b.set("quiet_since_ms", time.Now().Add(time.Hour).UnixMilli())
			require.Equal(t, []string{"sold-out"}, b.reserve(b.buy("cid")))
			testkit.Eventually(t, 30*time.Second, "the unit is sold",
				func() bool { return b.reserve(b.buy("cid"))[0] == "reserved 3" })
		})
	}
}

// No ingress remembers a sale with units left as sold out.
func TestUnitsReturnedToOpenSaleAreSoldImmediately(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	b.reserve(request{"ann", "order-ann", "-", "1"})
	require.Equal(t, []string{"released"}, b.release("ann", "order-ann"))
	require.Equal(t, "restocked 10", b.next("restock", lua.Restock, 10, 0))
	require.Equal(t, []string{"reserved 2"}, b.reserve(b.buy("bob")))
	require.Zero(t, b.rdb.HExists(t.Context(), b.saleKey, "quiet_since_ms").Val())
}

// Redis does not roll back the writes of a script that fails at a command without permission.
func TestScriptWithoutPermissionWritesNothing(t *testing.T) {
	t.Parallel()
	change := func(script *redis.Script, more ...any) func(*bench, *redis.Client) error {
		return func(b *bench, as *redis.Client) error {
			return script.Run(b.t.Context(), as, []string{b.saleKey}, append([]any{b.epoch, b.nextRevision}, more...)...).Err()
		}
	}
	for name, run := range map[string]func(b *bench, as *redis.Client) error{
		"reserve": func(b *bench, as *redis.Client) error {
			return lua.Reserve.Run(b.t.Context(), as, []string{b.saleKey, b.buyers, b.orders, b.ended},
				b.epoch, 0, "\x81\xa5count", "bob", "order-bob", "key", "1").Err()
		},
		"release": func(b *bench, as *redis.Client) error {
			return lua.Release.Run(b.t.Context(), as, []string{b.saleKey, b.buyers, b.ended}, b.epoch, "ann", "order-ann", "key",
				"1 c").Err()
		},
		"withdraw": func(b *bench, as *redis.Client) error {
			return lua.Withdraw.Run(b.t.Context(), as, []string{b.saleKey, b.buyers, b.ended}, "bob", "key", "1").Err()
		},
		"restock": change(lua.Restock, 10, 0),
		"pause":   change(lua.Change, "pause"),
		"end":     change(lua.Change, "end"),
		"open": func(b *bench, as *redis.Client) error {
			return lua.Open.Run(b.t.Context(), as, []string{b.saleKey + "-2", b.buyers + "-2", b.sales}, "two", b.epoch, 1, 1, 1,
				0, 0, 0, 0, "").Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBenchOnOwnRedis(t)
			b.open()
			b.reserve(request{"ann", "order-ann", "-", "1"})
			commands := []string{"-hset", "-hdel", "-sadd", "-xadd"}
			for key, rest := range map[string][]string{
				b.saleKey: {b.buyers, b.orders, b.sales, b.ended},
				b.buyers:  {b.saleKey, b.orders, b.sales, b.ended}, b.ended: {b.saleKey, b.buyers, b.orders, b.sales},
			} {
				rules := "resetkeys %R~" + key
				for _, k := range rest {
					rules += " ~" + k + "*"
				}
				commands = append(commands, rules)
			}
			refused := 0
			for _, rules := range commands {
				as := b.limited(rules)
				before, sales := b.state(), b.rdb.SMembers(t.Context(), b.sales).Val()
				if err := run(b, as); err == nil {
					b.rdb.FlushAll(t.Context())
					b.open()
					b.reserve(request{"ann", "order-ann", "-", "1"})
					continue
				}
				refused++
				require.Equal(t, before, b.state(), rules)
				require.ElementsMatch(t, sales, b.rdb.SMembers(t.Context(), b.sales).Val(), rules)
			}
			require.Positive(t, refused)
		})
	}
}

// limited returns a client with all rights except those that the rules remove.
func (b *bench) limited(rules string) *redis.Client {
	b.t.Helper()
	args := []any{"ACL", "SETUSER", "limited", "reset", "on", "nopass", "~*", "&*", "+@all"}
	for _, rule := range strings.Fields(rules) {
		args = append(args, rule)
	}
	require.NoError(b.t, b.rdb.Do(b.t.Context(), args...).Err())
	o := *b.rdb.(*redis.Client).Options()
	o.Username, o.Password = "limited", "any"
	as := redis.NewClient(&o)
	b.t.Cleanup(func() { _ = as.Close() })
	return as
}

// readable reservations have the forms that reserve.lua and a rebuild write.
var readable = []string{
	"order-ann 1 1 19c2d3e4f5a", "order-ann 1 1 19c2d3e4f5a:key-1", "order-ann 1 1 19c2d3e4f5a@12",
	"order-ann 1 1 19c2d3e4f5a:key-1@12",
	"AaH9eHpfdXukBQzkOOCaFQ 100 16777216 19c2d3e4f5a:_-aB0@2147483648",
}

// unreadable reservations have forms that no script writes.
var unreadable = []string{
	"", "?", "order-ann", "order-ann 1", "order-ann 1 1", "order-ann 1 1 ",
	"order-ann x 1 19c", "order-ann -1 1 19c", "order-ann 1 -1 19c", "order-ann 1 1f 19c", "order-ann 1 1 0x19c",
	"order-ann 1 1 19cg",
	"order-ann  1 1 19c", " order-ann 1 1 19c", "order-ann 1 1 19c ", "order-ann 1 1 19c\x00", "order-ann 1 1 19c\n",
	"order-ann 1 1 19c:", "order-ann 1 1 19c@", "order-ann 1 1 19c:key-1@", "order-ann 1 1 19c@x",
	"order-ann 1 1 19c@1:key-1", "order-ann 1 1 19c:a b",
	"order-ann 1 1 19c@1 2", "order-ann 1 1 19c@1@2", "order-ann 1 1 19c:a:b",
	"01a1fd78-7a5f-757b-a405-0ce438e09a15 1 7 1790000000000 -",
	"01a1fd78-7a5f-757b-a405-0ce438e09a15 1 7 1790000000000 key-1 1",
}

func (b *bench) hold(user, held string) {
	b.t.Helper()
	require.NoError(b.t, b.rdb.HSet(b.t.Context(), b.buyers, user, held).Err())
}

func TestReserveRejectsUnreadableReservation(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	for _, held := range readable {
		b.hold("ann", held)
		order, _, _ := strings.Cut(held, " ")
		quantity := strings.Fields(held)[1]
		sold, err := b.tryReserve(b.buy("ann"), request{"ann", order, "-", "7"})
		require.NoError(t, err)
		require.Equal(t, []string{"already-purchased " + held, "replayed " + held}, sold[3:])
		for _, key := range []string{"key-1", "_-aB0", "-", "12"} {
			sold, err := b.tryReserve(request{"ann", "order-ann-2", key, quantity})
			require.NoError(t, err)
			if key != "-" && strings.Contains(held, ":"+key) {
				require.Equal(t, "replayed "+held, sold[3])
			} else {
				require.Equal(t, "already-purchased "+held, sold[3], "with the key %s", key)
			}
		}
	}
	for _, held := range unreadable {
		b.hold("ann", held)
		before := b.state()
		require.Equal(t, []string{"damaged", "damaged"}, b.reserve(b.buy("ann"), request{"ann", "order-ann", "key-1", "1"}),
			held)
		require.Equal(t, before, b.state())
	}
	// Damage affects one buyer: the others of the batch are served.
	b.hold("ann", unreadable[1])
	require.Equal(t, []string{"reserved 1", "damaged", "reserved 2"},
		b.reserve(b.buy("first"), b.buy("ann"), b.buy("last")))
}

func TestAppendGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ask := func(pairs ...string) []string {
		args := []any{"\x81\xa5count"}
		for i := 0; i < len(pairs); i += 2 {
			args = append(args, pairs[i], pairs[i+1])
		}
		answers, err := lua.Append.Run(t.Context(), b.rdb, []string{b.buyers, b.orders}, args...).StringSlice()
		require.NoError(t, err)
		for _, a := range answers {
			b.collect("append", a)
		}
		return answers
	}
	b.hold("ann", "order-ann 1 16777216 1a0c2d3e4f5:key-1@2")
	b.hold("bob", "order-bob 1 2 19c")
	require.Equal(t, []string{"not-held", "appended", "appended", "not-held"},
		ask("ann", "order-bob", "ann", "order-ann", "bob", "order-bob", "cid", "order-cid"))
	entries, err := b.rdb.XRange(t.Context(), b.orders, "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, map[string]any{
		"_watermill_message_uuid": "order-ann", "metadata": "\x81\xa5count\xa12",
		"payload": "ann\norder-ann 1 16777216 1a0c2d3e4f5:key-1@2\nbob\norder-bob 1 2 19c",
	}, entries[0].Values, "as reserve.lua writes it")
	for _, held := range unreadable {
		b.hold("ann", held)
		require.Equal(t, []string{"damaged"}, ask("ann", "order-ann"), held)
	}
	for _, held := range []string{
		"order-ann b1a1 1 19c", "order-ann a0 1 19c", "order-ann a1b 1 19c", "order-ann 1a 1 19c",
	} {
		b.hold("ann", held)
		require.Equal(t, []string{"damaged"}, ask("ann", "order-ann"), held)
	}
	require.EqualValues(t, 1, b.events())
	b.hold("ann", "order-ann a2c1 1 19c")
	require.Equal(t, []string{"appended"}, ask("ann", "order-ann"))
	b.requireAllAnswers("append")
}

// A reservation that only some of the scripts can parse would be sold and never released.
func TestScriptsParseReservationsAlike(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(`'(\^\(%S\+\) \(%[dw]\+\) %d\+ [^']*\$)'`)
	read := map[string]string{}
	for _, script := range scripts(t) {
		if m := pattern.FindStringSubmatch(readHeader(t, script).body); m != nil {
			read[script] = strings.NewReplacer("(", "", ")", "", "%w+", "%d+").Replace(m[1])
		}
	}
	require.Len(t, read, 3, "reserve, release and append")
	var patterns []string
	for _, p := range read {
		patterns = append(patterns, p)
	}
	slices.Sort(patterns)
	require.Len(t, slices.Compact(patterns), 1, read)
}

func (b *bench) retire(revision int) string {
	b.t.Helper()
	answer, err := lua.Retire.Run(b.t.Context(), b.rdb, []string{b.saleKey, b.buyers, b.ended}, b.epoch, revision).Text()
	require.NoError(b.t, err)
	return b.collect("retire", answer)
}

func TestRetireGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.shard = "0 2 8"
	require.Equal(t, "unknown-sale", b.retire(2))
	b.open()
	ann, bob := request{"ann", "order-ann", "key-1", "1"}, request{"bob", "order-bob", "key-2", "1"}
	b.reserve(ann, bob)
	require.Equal(t, "released", b.end("bob", "order-bob", "key-2", "1 c"))
	require.Equal(t, "gap 1", b.retire(3))
	b.epoch = "2"
	require.Equal(t, "stale-epoch", b.retire(2))
	b.epoch = "1"
	require.Equal(t, "illegal open", b.retire(2))
	require.Equal(t, "changed", b.nextChange("pause"))
	before := b.state()
	require.Equal(t, "illegal paused", b.retire(b.nextRevision), "it can be resumed")
	require.Equal(t, before, b.state())
	require.Equal(t, "changed", b.nextChange("end"))
	generation := b.field("generation")

	require.Equal(t, "retired", b.retire(b.nextRevision))
	require.Equal(t, "unchanged", b.retire(b.nextRevision))
	require.Zero(t, b.rdb.Exists(t.Context(), b.buyers, b.ended).Val())
	require.NotEqual(t, generation, b.field("generation"), "ingresses that remember the sale as sold out look again")
	require.Equal(t, "0 2 8", b.field("shard"))
	require.Equal(t, "retired", b.field("state"))
	b.requireAllAnswers("retire")

	before = b.state()
	require.Equal(t, []string{"retired", "retired"}, b.reserve(ann, b.buy("eve")), "whoever asks, Postgres has the answer")
	require.Equal(t, "not-held", b.end("ann", "order-ann", "key-1", "1 c"), "an order that is cancelled later")
	require.Equal(t, "unchanged", b.open(), "a late publisher does not open it again")
	require.Equal(t, "unchanged", b.take(1, 5), "nor do late units that another shard has given")
	require.Equal(t, "told 0", b.give(1, 0, 1))
	require.Equal(t, before, b.state())
}

// A sale is over at its closing time, whatever its state is.
func TestRetireAcceptsSaleThatHasClosed(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.closesAt = 1
	b.open()
	require.Equal(t, "retired", b.retire(2))
	require.Equal(t, []string{"retired"}, b.reserve(b.buy("ann")))
}
