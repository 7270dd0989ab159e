package audit_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// sharded is a sale over 4 shards of a shop with 8 partitions.
type sharded struct {
	*testshop.Shop
	t    testing.TB
	sale uuid.UUID
	at   reservation.Layout
}

func openSharded(t testing.TB, stock int64) sharded {
	t.Helper()
	keys := testkit.Keys(t)
	keys.Partitions = 8
	s := sharded{Shop: testshop.NewShopOn(t, testshop.Options{Keys: keys}), t: t}
	s.sale = s.OpenSharded(t, stock, 4)
	s.at = s.Layout(t, s.sale)
	return s
}

func (s sharded) key(shard int) string { return s.Keys.Sale(s.at.Partition(shard), s.sale) }

func (s sharded) buyers(shard int) string { return s.Keys.Buyers(s.at.Partition(shard), s.sale) }

// number returns the number in a field of a shard, 0 if it is missing.
func (s sharded) number(shard int, field string) int64 {
	n, _ := strconv.ParseInt(s.Rdb.HGet(s.t.Context(), s.key(shard), field).Val(), 10, 64)
	return n
}

func (s sharded) set(shard int, field string, value any) {
	s.t.Helper()
	require.NoError(s.t, s.Rdb.HSet(s.t.Context(), s.key(shard), field, value).Err())
}

func (s sharded) add(shard int, field string, n int64) {
	s.t.Helper()
	require.NoError(s.t, s.Rdb.HIncrBy(s.t.Context(), s.key(shard), field, n).Err())
}

// user returns the n-th user of a shard.
func (s sharded) user(shard, n int) string {
	for i := 0; ; i++ {
		if user := fmt.Sprintf("user-%d", i); s.at.ShardOf(user) == shard {
			if n--; n < 0 {
				return user
			}
		}
	}
}

// held returns what a user of a shard holds, and its text in Redis.
func (s sharded) held(shard int, user string) (order.Reservation, string) {
	s.t.Helper()
	text := s.Rdb.HGet(s.t.Context(), s.buyers(shard), user).Val()
	r, _, err := order.ParseReservation(text)
	require.NoError(s.t, err, "%s: %q", user, text)
	return r, text
}

// requireKept requires that the audit finds nothing, and returns the figures of the sale.
func (s sharded) requireKept() audit.SaleFigures {
	s.t.Helper()
	report := testwork.Audit(s.t, s.Shop, uuid.Nil)
	require.False(s.t, report.Broken() || report.Unchecked(), testwork.Text(s.t, report))
	return report.Sales[0]
}

func TestAuditOfSaleOverShardsPassesEveryPromise(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 200)
	require.Equal(t, 150, s.Crowd(t, s.sale, 150))
	testwork.FulfilAll(t, s.Shop)
	figures := s.requireKept()
	require.Equal(t, 4, figures.Shards)
	require.Equal(t, []int64{50, 150, 150, 0, 150}, []int64{
		figures.Available, figures.LiveUnits, figures.Places, figures.OnTheWay, figures.Buyers,
	})
	require.Equal(t, 200, 150+s.Crowd(t, s.sale, 300), "the whole stock is sold")
	testwork.FulfilAll(t, s.Shop)
	figures = s.requireKept()
	require.EqualValues(t, 200, figures.Places)
	report := testwork.Audit(t, s.Shop, s.sale)
	require.Contains(t, testwork.Text(t, report), " test, over 4 shards\n")
	encoded, err := json.Marshal(report)
	require.NoError(t, err)
	require.Contains(t, string(encoded), `"shards":4,`)
}

// Units that one shard has given and another has not taken are available.
func TestAuditCountsUnitsOnTheirWayAsAvailable(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 40)
	s.Buy(t, s.sale, s.user(0, 0))
	testwork.FulfilAll(t, s.Shop)
	testwork.GiveUnits(t, s.Shop, s.sale, 1, 2)
	figures := s.requireKept()
	require.Equal(t, []int64{39, 5}, []int64{figures.Available, figures.OnTheWay})
	require.Contains(t, testwork.Text(t, testwork.Audit(t, s.Shop, s.sale)), ", over 4 shards, 5 units on their way\n")
	require.Equal(t, 39, s.Crowd(t, s.sale, 100))
	testwork.FulfilAll(t, s.Shop)
	figures = s.requireKept()
	require.Equal(t, []int64{0, 0}, []int64{figures.Available, figures.OnTheWay})
}

// Places that a rebuild skips, because shards have not come equally far, are not lost.
func TestAuditCountsPlacesOfShardsAfterRebuild(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 100)
	for n := range 9 {
		s.Buy(t, s.sale, s.user(3, n))
	}
	s.Buy(t, s.sale, s.user(1, 0))
	testwork.FulfilAll(t, s.Shop)
	require.EqualValues(t, 10, s.requireKept().Places)
	rebuilder := testwork.Rebuilder(t, s.Shop)
	for n := range 2 {
		_, err := rebuilder.Sale(t.Context(), s.sale, rebuild.ReasonByHand)
		require.NoError(t, err)
		figures := s.requireKept()
		require.Equal(t, []int64{int64(10 + 2*n), 0}, []int64{figures.Places, figures.Lost})
		s.Buy(t, s.sale, s.user(0, n))
		s.Buy(t, s.sale, s.user(1, 1+n))
		testwork.FulfilAll(t, s.Shop)
		require.EqualValues(t, 12+2*n, s.requireKept().Places)
	}
	// An order is lost wholly, and the stock rebuilt without it.
	lost, _ := s.held(3, s.user(3, 4))
	for _, table := range []string{"orders WHERE id", "order_events WHERE order_id"} {
		require.NoError(t, s.Exec(t, "DELETE FROM "+table+" = $1", lost.OrderID))
	}
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = sold - 1"))
	_, err := rebuilder.RaiseShards(t.Context(), s.sale, 7, rebuild.ReasonByHand)
	require.NoError(t, err)
	figures := s.requireKept()
	require.Equal(t, []int64{14, 1}, []int64{figures.Places, figures.Lost})
	require.Equal(t, 7, figures.Shards)
}

// broken lists the promises that the corruption breaks. No other may be broken. The sale has 30 orders of 40 units.
func TestAuditReportsEachCorruptionOfShard(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		corrupt func(s sharded) (says string)
		broken  string
		remedy  audit.Remedy // of the finding with that text
		left    string       // the remedies that Reconcile does not apply
	}{
		{
			"units missing in a shard", func(s sharded) string {
				share, left := s.number(3, "stock"), s.number(3, "left")
				s.add(3, "left", -2)
				return fmt.Sprintf("shard 3: its share of the stock is %d: %d left, %d taken", share, left-2, share-left)
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"units on another shard without a move", func(s sharded) string {
				s.add(0, "left", -1)
				s.add(1, "left", 1)
				return "shard 1: its share of the stock is "
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"fewer than 0 units left in a shard", func(s sharded) string {
				s.add(0, "left", s.number(2, "left")+1)
				s.add(0, "stock", s.number(2, "left")+1)
				s.add(2, "stock", -s.number(2, "left")-1)
				s.set(2, "left", -1)
				return "shard 2: Redis has -1 units left"
			}, "S1", audit.RemedyRebuild, "",
		},
		{
			"more got than given", func(s sharded) string {
				given := s.number(0, "given:1")
				s.add(1, "got:0", 5)
				s.add(1, "stock", 5)
				s.add(1, "left", 5)
				return fmt.Sprintf("shard 1: it has got %d units from shard 0, which has given it %d", given+5, given)
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"given units that no shard had", func(s sharded) string {
				s.add(0, "given:1", 3)
				return "the stock is 40 in Postgres and 43 in Redis"
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"a damaged total of given units", func(s sharded) string {
				s.set(2, "given:1", "x")
				return `shard 2: its fields in Redis are damaged: given:1 is "x"`
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"a buyer in another shard", func(s sharded) string {
				user := s.user(1, 0)
				_, text := s.held(1, user)
				require.NoError(s.t, s.Rdb.HDel(s.t.Context(), s.buyers(1), user).Err())
				require.NoError(s.t, s.Rdb.HSet(s.t.Context(), s.buyers(2), user, text).Err())
				return "user " + user + ": shard 2: the reservation is of a user of shard 1"
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"a buyer at a place of another shard", func(s sharded) string {
				fast, slow := 0, 0
				for shard := range 4 {
					if s.number(shard, "sequence") > s.number(fast, "sequence") {
						fast = shard
					}
					if s.number(shard, "sequence") < s.number(slow, "sequence") {
						slow = shard
					}
				}
				user, place := s.user(fast, 0), s.number(slow, "sequence")+1
				r, text := s.held(fast, user)
				text = strings.Replace(text, fmt.Sprintf(" 1 %d ", r.Sequence), fmt.Sprintf(" 1 %d ", place), 1)
				require.NoError(s.t, s.Rdb.HSet(s.t.Context(), s.buyers(fast), user, text).Err())
				return fmt.Sprintf("user %s: shard %d: the reservation is at place %d, which is one of shard %d",
					user, fast, place, slow)
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"a buyer at a place that was not given out", func(s sharded) string {
				s.Rdb.HSet(s.t.Context(), s.buyers(2), s.user(2, 90),
					order.CompactID(order.NewOrderID(s.sale))+" 1 403 1a0c2d3e4f5")
				return fmt.Sprintf("shard 2: the reservation is at place 403, and the next place is %d", s.number(2, "sequence")+1)
			}, "S3 S4", audit.RemedyRebuild, "",
		},
		{
			"a damaged reservation", func(s sharded) string {
				require.NoError(s.t, s.Rdb.HSet(s.t.Context(), s.buyers(2), s.user(2, 0), "x").Err())
				return `shard 2: the reservation in Redis is damaged: "x"`
			}, "S4", audit.RemedyRebuild, "",
		},
		{
			"an order lost in Postgres", func(s sharded) string {
				user := s.user(2, 0)
				r, _ := s.held(2, user)
				for _, statement := range []string{
					"DELETE FROM order_events WHERE order_id = $1", "DELETE FROM orders WHERE id = $1",
					"UPDATE sales SET sold = sold - 1, last_sequence = (SELECT max(sequence) FROM orders) WHERE $1::uuid IS NOT NULL",
				} {
					_, err := s.Pool.Exec(s.t.Context(), statement, r.OrderID)
					require.NoError(s.t, err)
				}
				return "user " + user + ": the order was accepted and is not in Postgres"
			}, "S3", audit.RemedyAppend, "",
		},
		{
			"the place of a shard in another one", func(s sharded) string {
				s.set(2, "shard", "1 4 8")
				return `shard 2: its place among the shards is "1 4 8" in Redis and "2 4 8" in Postgres`
			}, "S7", audit.RemedyRebuild, "",
		},
		{
			"a shard that is a sale of its own", func(s sharded) string {
				require.NoError(s.t, s.Rdb.HDel(s.t.Context(), s.key(3), "shard").Err())
				return `shard 3: its place among the shards is "" in Redis and "3 4 8" in Postgres`
			}, "S7", audit.RemedyRebuild, "",
		},
		{
			"a shard lost", func(s sharded) string {
				require.NoError(s.t, s.Rdb.Del(s.t.Context(), s.key(1), s.buyers(1)).Err())
				return "shard 1: Redis has lost it: nothing is sold to its users until the sale is rebuilt from Postgres"
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"a shard of a wrong type", func(s sharded) string {
				require.NoError(s.t, s.Rdb.Set(s.t.Context(), s.key(1), "x", 0).Err())
				return "shard 1: its key in Redis has a wrong type"
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"buyers of a wrong type", func(s sharded) string {
				require.NoError(s.t, s.Rdb.Set(s.t.Context(), s.buyers(1), "x", 0).Err())
				return "shard 1: the key of its buyers in Redis has a wrong type"
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"a shard in another epoch", func(s sharded) string {
				s.set(3, "epoch", 2)
				return "shard 3: Redis has the stock of epoch 2, Postgres is in epoch 1"
			}, "S7", audit.RemedyRebuild, "",
		},
		{
			"a shard with other terms", func(s sharded) string {
				s.set(2, "state", "paused")
				s.set(2, "revision", 2)
				return "shard 2: Redis has another definition of the sale than Postgres: state is paused and not open, " +
					"revision is 2 and not 1"
			}, "S7", audit.RemedyRebuild, "",
		},
		{
			"a sequence of another shard", func(s sharded) string {
				s.add(2, "sequence", 1)
				return fmt.Sprintf("shard 2: its fields in Redis are damaged: sequence is %d, before a place of another shard",
					s.number(2, "sequence"))
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"places without orders", func(s sharded) string {
				place := s.number(2, "sequence") + 1
				s.add(2, "sequence", 8)
				return fmt.Sprintf("shard 2: places %d to %d of the sale were given out and no order has them", place, place+4)
			}, "S5", audit.RemedyOperator, "operator",
		},
		{
			"a shard set back", func(s sharded) string {
				last := s.number(1, "sequence") - 3
				var user string
				require.NoError(s.t, s.Pool.QueryRow(s.t.Context(), "SELECT user_id FROM orders WHERE sequence = $1", last).
					Scan(&user))
				require.NoError(s.t, s.Rdb.HDel(s.t.Context(), s.buyers(1), user).Err())
				s.add(1, "sequence", -4)
				s.add(1, "left", 1)
				return fmt.Sprintf("shard 1: the next place is %d, and Postgres has an order at place %d: Redis was set back",
					last, last)
			}, "S4 S7", audit.RemedyRebuild, "",
		},
		{
			"a shard that is not listed", func(s sharded) string {
				require.NoError(s.t, s.Rdb.SRem(s.t.Context(), s.Keys.Sales(s.at.Partition(2)), s.sale.String()).Err())
				return "shard 2: Redis has the sale, and does not list it among the sales of its partition"
			}, "S7", audit.RemedyRebuild, "",
		},
		{
			"a used idempotency key in another shard", func(s sharded) string {
				user := s.user(1, 80)
				id := s.Attempt(s.t, s.sale, user, 1, "key").Reservation.OrderID
				testwork.FulfilAll(s.t, s.Shop)
				_, err := ledger.New(s.Pool).Cancel(s.t.Context(), id, user)
				require.NoError(s.t, err)
				testwork.ProcessWaiting(s.t, s.Shop)
				s.requireKept()
				ended := s.Rdb.HGetAll(s.t.Context(), s.Keys.Ended(s.at.Partition(1), s.sale)).Val()
				require.Len(s.t, ended, 1)
				require.NoError(s.t, s.Rdb.Rename(s.t.Context(), s.Keys.Ended(s.at.Partition(1), s.sale),
					"{other}"+s.Keys.Prefix).Err())
				require.NoError(s.t, s.Rdb.HSet(s.t.Context(), s.Keys.Ended(s.at.Partition(2), s.sale), ended).Err())
				s.set(2, "ended", 1)
				return "the order is cancelled, and its idempotency key is missing in Redis: a retry would buy again"
			}, "S7", audit.RemedyRebuild, "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := openSharded(t, 40)
			require.Equal(t, 30, s.Crowd(t, s.sale, 30))
			testwork.FulfilAll(t, s.Shop)
			s.requireKept()
			says := c.corrupt(s)
			report := testwork.Audit(t, s.Shop, s.sale)
			text := testwork.Text(t, report)
			require.Equal(t, c.broken, testwork.Broken(report), text)
			require.Contains(t, text, says)
			remedies := map[audit.Remedy]bool{}
			for _, p := range report.Promises {
				for _, f := range p.Findings {
					if strings.Contains(f.String(), says) {
						remedies[f.Remedy] = true
					}
				}
			}
			require.Equal(t, map[audit.Remedy]bool{c.remedy: true}, remedies, text)
			testwork.RequireMended(t, s.Shop, s.sale, c.left)
			if c.left == "" {
				s.RequireShards(t, s.sale)
			}
		})
	}
}

func TestAuditReportsImpossibleShards(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 40)
	require.NoError(t, s.Exec(t, "UPDATE sales SET shards = 9"))
	report := testwork.Audit(t, s.Shop, s.sale)
	require.Contains(t, testwork.Text(t, report),
		"sales.shards is 9, and sales.partitions is 8: nothing else of the sale is checked")
	require.Equal(t, audit.RemedyOperator, report.Promise("S7").Findings[0].Remedy)
}

// openShardedItems is openSharded for 6 of s, 30 of m and 12 of l. Some of each are sold, and some have moved.
func openShardedItems(t testing.TB) sharded {
	t.Helper()
	keys := testkit.Keys(t)
	keys.Partitions = 8
	s := sharded{Shop: testshop.NewShopOn(t, testshop.Options{Keys: keys}), t: t}
	created := s.ShardedItems(t, 4, reservation.Item{Code: "s", Stock: 6}, reservation.Item{Code: "m", Stock: 30},
		reservation.Item{Code: "l", Stock: 12, PerOrderLimit: 9})
	s.sale, s.at = created.ID, created.Layout()
	for shard, items := range []map[string]int64{{"s": 3, "m": 7}, {"m": 1}, {"s": 1, "l": 2}, {"l": 2}} {
		answer, err := s.Reserve(t.Context(), reservation.Request{Sale: s.sale, User: s.user(shard, 0), Items: items})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
	}
	testwork.FulfilAll(t, s.Shop)
	return s
}

func TestAuditOfItemsOverShardsPassesEveryPromise(t *testing.T) {
	t.Parallel()
	s := openShardedItems(t)
	figures := s.requireKept()
	require.Equal(t, []int64{32, 0}, []int64{figures.Available, figures.OnTheWay})
	give := []string{s.key(3)}
	require.Equal(t, "given b4c1", s.Rdb.Eval(t.Context(), lua.FencedBy("test").Give.Source, give,
		1, 1, "0", 2, "sold", "bc").Val())
	figures = s.requireKept()
	require.Equal(t, []int64{32, 5}, []int64{figures.Available, figures.OnTheWay})
	text := testwork.Text(t, testwork.Audit(t, s.Shop, s.sale))
	require.Contains(t, text, ", over 4 shards, 5 units on their way\n")
	s.RequireShards(t, s.sale)
}

// Each lie about an item is found in the shard that tells it, and about no other promise.
func TestAuditReportsEachCorruptionOfItemsOverShards(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		corrupt func(s sharded) (says string)
		broken  string
	}{
		"units missing in a shard": {func(s sharded) string {
			s.add(3, "left.b", -2)
			s.add(3, "left", -2)
			return fmt.Sprintf("shard 3: its share of the item m is %d: %d left, 0 taken", s.number(3, "stock.b"),
				s.number(3, "stock.b")-2)
		}, "S4"},
		"units of another item": {func(s sharded) string {
			s.add(3, "left.b", -1)
			s.add(3, "left.a", 1)
			return "shard 3: its share of the item s is "
		}, "S4"},
		"units on another shard without a move": {func(s sharded) string {
			for shard, units := range map[int]int64{1: 1, 3: -1} {
				s.add(shard, "left.b", units)
				s.add(shard, "left", units)
			}
			return "shard 1: its share of the item m is "
		}, "S4"},
		"a share on another shard": {func(s sharded) string {
			for shard, units := range map[int]int64{1: 1, 3: -1} {
				s.add(shard, "stock.b", units)
				s.add(shard, "stock", units)
			}
			return "shard 3: its share of the item m is "
		}, "S4"},
		"another sum of the items": {func(s sharded) string {
			s.add(2, "left", 1)
			s.add(2, "stock", 1)
			return "shard 2: Redis has "
		}, "S4"},
		"fewer than 0 units left in a shard": {func(s sharded) string {
			units := s.number(2, "left.c") + 1
			for shard, more := range map[int]int64{2: -units, 0: units} {
				for _, field := range []string{"left.c", "stock.c", "left", "stock"} {
					s.add(shard, field, more)
				}
			}
			return "shard 2: Redis has -1 units of the item l left"
		}, "S1"},
		"more got than given": {func(s sharded) string {
			s.set(1, "got:3", "b5")
			for _, field := range []string{"left.b", "stock.b", "left", "stock"} {
				s.add(1, field, 5)
			}
			return "shard 1: it has got 5 units of the item m from shard 3, which has given it 0"
		}, "S4"},
		"given units that no shard had": {func(s sharded) string {
			s.set(3, "given:1", "b3")
			return "the stock of the item m is 30 in Postgres and 33 in Redis"
		}, "S4"},
		"units of one item given and of another one got": {func(s sharded) string {
			s.set(3, "given:1", "b3")
			s.set(1, "got:3", "c3")
			return "shard 1: it has got 3 units of the item l from shard 3, which has given it 0"
		}, "S4"},
		"a damaged total": {func(s sharded) string {
			s.set(2, "given:1", "b1a1")
			return `shard 2: its fields in Redis are damaged: given:1 is "b1a1"`
		}, "S4 S7"},
		"a total without an item": {func(s sharded) string {
			s.set(2, "given:1", "5")
			return `shard 2: its fields in Redis are damaged: given:1 is "5"`
		}, "S4 S7"},
		"another limit": {func(s sharded) string {
			s.set(2, "limit.c", 8)
			return "shard 2: Redis has another limit of the item l than Postgres: 8 and not 9"
		}, "S7"},
		"other codes": {func(s sharded) string {
			s.set(2, "items", "s m xl")
			return `shard 2: its items are "s m xl" in Redis and "s m l" in Postgres`
		}, "S7"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := openShardedItems(t)
			s.requireKept()
			says := c.corrupt(s)
			report := testwork.Audit(t, s.Shop, s.sale)
			text := testwork.Text(t, report)
			require.Equal(t, c.broken, testwork.Broken(report), text)
			require.Contains(t, text, says)
			testwork.RequireMended(t, s.Shop, s.sale, "")
			s.RequireShards(t, s.sale)
		})
	}
}
