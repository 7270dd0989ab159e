package lua_test

import (
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
