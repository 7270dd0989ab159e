package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// shardFields returns a field of all shards.
func shardFields(t testing.TB, s *testshop.Shop, sale catalog.CountedSale, field string) (values []string) {
	t.Helper()
	for shard := range sale.Shards {
		values = append(values, s.Rdb.HGet(t.Context(),
			s.Keys.Sale(sale.Layout().Partition(shard), sale.ID), field).Val())
	}
	return values
}

// shardStocks returns the stock in Postgres, and what all shards have: the stock, and the units left.
func shardStocks(t testing.TB, s *testshop.Shop, sale catalog.CountedSale) []int64 {
	t.Helper()
	sums := make([]int64, 3)
	require.NoError(t,
		s.Pool.QueryRow(t.Context(), "SELECT stock FROM sales WHERE id = $1", sale.ID).Scan(&sums[0]))
	for i, field := range []string{"stock", "left"} {
		for _, text := range shardFields(t, s, sale, field) {
			n, err := strconv.ParseInt(text, 10, 64)
			require.NoError(t, err)
			require.GreaterOrEqual(t, n, int64(0))
			sums[i+1] += n
		}
	}
	return sums
}

func publishedRevision(t testing.TB, s *testshop.Shop, sale catalog.CountedSale) (published, revision int64) {
	t.Helper()
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT published_revision, revision FROM sales WHERE id = $1", sale.ID).Scan(&published, &revision))
	return published, revision
}

// tenUnits returns a sale of 10 units in 4 shards, of which 6 are taken.
func tenUnits(t testing.TB, s *testshop.Shop) catalog.CountedSale {
	t.Helper()
	sale := s.ShardedSale(t, 10, 4)
	for i := range 6 {
		s.Buy(t, sale.ID, fmt.Sprint("user-", i))
	}
	return sale
}

// tenItems is tenUnits for a sale with 6 m and 4 l, of which 4 m and 2 l are taken.
func tenItems(t testing.TB, s *testshop.Shop) catalog.CountedSale {
	t.Helper()
	sale := s.ShardedItems(t, 4, reservation.Item{Code: "m", Stock: 6}, reservation.Item{Code: "l", Stock: 4})
	for i, items := range []map[string]int64{{"m": 2, "l": 1}, {"m": 1}, {"m": 1, "l": 1}} {
		answer, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: fmt.Sprint("user-", i), Items: items})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
	}
	return sale
}

// itemStocks returns what all shards have of each item: the stock, and the units left.
func itemStocks(t testing.TB, s *testshop.Shop, sale catalog.CountedSale) (stocks []int64) {
	t.Helper()
	for _, field := range []string{"stock.a", "left.a", "stock.b", "left.b"} {
		sum := int64(0)
		for _, text := range shardFields(t, s, sale, field) {
			n, err := strconv.ParseInt(text, 10, 64)
			require.NoError(t, err)
			require.GreaterOrEqual(t, n, int64(0))
			sum += n
		}
		stocks = append(stocks, sum)
	}
	return stocks
}

func TestRestockOfItemsInShards(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := tenItems(t, s)
	_, err := s.RestockItems(t.Context(), sale.ID, map[string]int64{"m": -1, "l": -3}, "too-many")
	var tooLow *catalog.TakenError
	require.ErrorAs(t, err, &tooLow)
	require.Equal(t, catalog.TakenError{Taken: 2, Items: `{"l":2}`}, *tooLow)
	require.Equal(t, []int64{6, 2, 4, 2}, itemStocks(t, s, sale), "also the m are put back")

	lowered, err := s.RestockItems(t.Context(), sale.ID, map[string]int64{"m": -2, "l": -1}, "")
	require.NoError(t, err)
	require.Equal(t, []int64{7, 1, 0, 1},
		[]int64{lowered.Stock, lowered.Available, lowered.Items[0].Available, lowered.Items[1].Available})
	require.Equal(t, []int64{4, 0, 3, 1}, itemStocks(t, s, sale))
	raised, err := s.RestockItems(t.Context(), sale.ID, map[string]int64{"m": 5}, "")
	require.NoError(t, err)
	require.Equal(t, []int64{12, 6, 5, 1},
		[]int64{raised.Stock, raised.Available, raised.Items[0].Available, raised.Items[1].Available})
	require.Equal(t, []int64{9, 5, 3, 1}, itemStocks(t, s, sale))
	testkit.Eventually(t, 30*time.Second, "they are sold, after a second if they came to an empty shard", func() bool {
		answer, err := s.Reserve(t.Context(),
			reservation.Request{Sale: sale.ID, User: "later", Items: map[string]int64{"m": 5, "l": 1}})
		require.NoError(t, err)
		return answer.Verdict == reservation.Reserved
	})
}

func TestRestockOfShards(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := tenUnits(t, s)
	before := shardFields(t, s, sale, "left")
	_, err := s.Restock(t.Context(), sale.ID, -5, "too-many")
	require.EqualValues(t, 6, taken(t, s, err))
	require.Equal(t, before, shardFields(t, s, sale, "left"), "each shard has what it had")
	require.Equal(t, []int64{10, 10, 4}, shardStocks(t, s, sale))
	_, err = s.Restock(t.Context(), sale.ID, -5, "too-many")
	require.EqualValues(t, 6, taken(t, s, err), "the same key gets the same refusal")

	lowered, err := s.Restock(t.Context(), sale.ID, -3, "")
	require.NoError(t, err)
	require.Equal(t, []int64{7, 1, 6}, []int64{lowered.Stock, lowered.Available, lowered.Held})
	require.Equal(t, []int64{7, 7, 1}, shardStocks(t, s, sale))
	before = shardFields(t, s, sale, "stock")
	raised, err := s.Restock(t.Context(), sale.ID, 6, "")
	require.NoError(t, err)
	require.Equal(t, []int64{13, 7, 6}, []int64{raised.Stock, raised.Available, raised.Held})
	for shard, stock := range shardFields(t, s, sale, "stock") {
		was, err := strconv.ParseInt(before[shard], 10, 64)
		require.NoError(t, err)
		require.Equal(t, strconv.FormatInt(was+sale.Layout().Share(6, shard), 10), stock)
	}
	for i := range 7 {
		testkit.Eventually(t, 30*time.Second, "a unit is sold, after a second if it returned to an empty shard",
			func() bool { return s.Ask(t, sale.ID, fmt.Sprint("later-", i)).Verdict == reservation.Reserved })
	}
	_, err = s.Restock(t.Context(), sale.ID, -1, "")
	require.EqualValues(t, 13, taken(t, s, err))
}

// Units on their way between two shards can be removed as well.
func TestLoweringTakesUnitsOnTheirWay(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 10, 2)
	giver := []string{s.Keys.Sale(sale.Layout().Partition(1), sale.ID)}
	give := redis.NewScript(lua.FencedBy("").Give.Source)
	require.Equal(t, "given 3", give.Run(t.Context(), s.Rdb, giver, 1, 0, 0, 2, "sold").Val())
	s.Buy(t, sale.ID, "ann")
	lowered, err := s.Restock(t.Context(), sale.ID, -9, "")
	require.NoError(t, err)
	require.Equal(t, []int64{1, 0, 1}, []int64{lowered.Stock, lowered.Available, lowered.Held})
	require.Equal(t, []int64{1, 1, 0}, shardStocks(t, s, sale))
}

// A change of the stock is cut off before each of its calls of Redis, and before each of its steps in Postgres. The
// next publisher completes it, exactly once.
func TestInterruptedRestockOfShardsIsFinishedOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		units   int64
		items   map[string]int64
		refused bool
		after   []int64
	}{
		"granted":       {-3, nil, false, []int64{7, 7, 1}},
		"refused":       {-7, nil, true, []int64{10, 10, 4}},
		"raised":        {5, nil, false, []int64{15, 15, 9}},
		"granted items": {0, map[string]int64{"m": -2, "l": -1}, false, []int64{7, 7, 1, 4, 0, 3, 1}},
		"refused items": {0, map[string]int64{"m": -3, "l": -2}, true, []int64{10, 10, 4, 6, 2, 4, 2}},
		"raised items":  {0, map[string]int64{"m": 3, "l": 2}, false, []int64{15, 15, 9, 9, 5, 6, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShardedShop(t)
			open := func() catalog.CountedSale {
				if c.items != nil {
					return tenItems(t, s)
				}
				return tenUnits(t, s)
			}
			restock := func(shop *testshop.Shop, sale catalog.CountedSale) error {
				var err error
				if c.items != nil {
					_, err = shop.RestockItems(t.Context(), sale.ID, c.items, "key")
				} else {
					_, err = shop.Restock(t.Context(), sale.ID, c.units, "key")
				}
				return err
			}
			stocks := func(sale catalog.CountedSale) []int64 {
				if c.items != nil {
					return append(shardStocks(t, s, sale), itemStocks(t, s, sale)...)
				}
				return shardStocks(t, s, sale)
			}
			requireOutcome := func(err error) {
				t.Helper()
				switch {
				case c.refused && c.items != nil:
					var tooLow *catalog.TakenError
					require.ErrorAs(t, err, &tooLow)
					require.Equal(t, catalog.TakenError{Taken: 4, Items: `{"m":4}`}, *tooLow)
				case c.refused:
					require.EqualValues(t, 6, taken(t, s, err))
				default:
					require.NoError(t, err)
				}
			}
			finish := func(sale catalog.CountedSale, cut int) {
				t.Helper()
				if cut%2 == 0 {
					_, err := s.PublishPending(t.Context())
					require.NoError(t, err)
				}
				requireOutcome(restock(s, sale))
				require.Equal(t, c.after, stocks(sale), "cut off after %d calls", cut)
				published, revision := publishedRevision(t, s, sale)
				require.Equal(t, revision, published)
			}
			rdb, wire := testshop.Wired(t, testkit.RedisURL(t))
			for cut := 0; ; cut++ {
				sale, ingress := open(), s.Next(t, rdb)
				wire.Set(testshop.KilledAfter(cut))
				err := restock(ingress, sale)
				if !errors.Is(err, reservation.ErrUnavailable) && !errors.Is(err, catalog.ErrNotInForce) {
					requireOutcome(err)
					require.GreaterOrEqual(t, cut, 4, "it was cut off before")
					break
				}
				finish(sale, cut)
				for _, late := range wire.Calls() {
					testshop.Repeat(t, s.Rdb, late)
				}
				require.Equal(t, c.after, stocks(sale), "after late calls")
				wire.Forget()
			}
			for cut, step := range []string{
				"INSERT ON sale_events FOR EACH ROW WHEN (NEW.data ? 'lowering')",
				"UPDATE OF data ON sale_events FOR EACH ROW",
				"UPDATE OF published_revision ON sales FOR EACH ROW",
			} {
				sale, repair := open(), breakAt(t, s.Pool, step)
				_ = restock(s, sale)
				repair()
				finish(sale, cut)
			}
		})
	}
}

// rebuildShards rebuilds the stock of all shards from Postgres, with 6 orders.
func rebuildShards(t testing.TB, s *testshop.Shop, sale catalog.CountedSale) {
	t.Helper()
	var revision, stock int64
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"UPDATE sales SET epoch = 2 WHERE id = $1 RETURNING revision, stock", sale.ID).Scan(&revision, &stock))
	for shard := range sale.Shards {
		key := s.Keys.Sale(sale.Layout().Partition(shard), sale.ID)
		held := s.Rdb.HLen(t.Context(), s.Keys.Buyers(sale.Layout().Partition(shard), sale.ID)).Val()
		left := sale.Layout().Share(stock-6, shard)
		require.NoError(t, s.Rdb.HDel(t.Context(), key, "restocked").Err())
		require.NoError(t,
			s.Rdb.HSet(t.Context(), key, "epoch", 2, "stock", left+held, "left", left, "revision", revision).Err())
	}
}

// A lowering is cut off before each of its calls, and then the stock is rebuilt.
func TestRebuildWithdrawsLoweringOfShards(t *testing.T) {
	t.Parallel()
	for name, units := range map[string]int64{"granted": -3, "refused": -7} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShardedShop(t)
			rdb, wire := testshop.Wired(t, testkit.RedisURL(t))
			for cut := 0; ; cut++ {
				sale := tenUnits(t, s)
				wire.Set(testshop.KilledAfter(cut))
				_, err := s.Next(t, rdb).Restock(t.Context(), sale.ID, units, "key")
				if !errors.Is(err, catalog.ErrRestockUndecided) {
					require.GreaterOrEqual(t, cut, 8, "it was cut off before")
					break
				}
				stock := shardStocks(t, s, sale)[0]
				rebuildShards(t, s, sale)
				for _, late := range wire.Calls() {
					testshop.Repeat(t, s.Rdb, late)
				}
				wire.Forget()
				_, err = s.PublishPending(t.Context())
				require.NoError(t, err)
				require.Equal(t, []int64{stock, stock, stock - 6}, shardStocks(t, s, sale), "cut off after %d calls", cut)
				for range 2 { // a repeat is a new lowering, unless that was granted or refused before
					_, err = s.Restock(t.Context(), sale.ID, units, "key")
					if units == -7 {
						require.EqualValues(t, 6, taken(t, s, err))
						require.Equal(t, []int64{10, 10, 4}, shardStocks(t, s, sale))
					} else {
						require.NoError(t, err)
						require.Equal(t, []int64{7, 7, 1}, shardStocks(t, s, sale))
					}
				}
			}
		})
	}
}

// A pause, a resumption and an end are published when all shards have them; one cannot be reached at first.
func TestChangeIsPublishedWhenAllShardsHaveIt(t *testing.T) {
	// Not parallel: a server that is distrusted loses its scripts, which the other tests of this package need.
	s := testshop.NewShardedShop(t)
	sale := tenUnits(t, s)
	unreachable := testkit.Client(t, testkit.RedisURL(t))
	unreachable.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			if key, ok := arg.(string); ok && key == s.Keys.Sale(sale.Layout().Partition(2), sale.ID) {
				cmd.SetErr(errors.New("cut off"))
				return cmd.Err()
			}
		}
		return next(ctx, cmd)
	}))
	cutOff := s.Next(t, unreachable)
	for at, change := range []struct {
		do     func(testing.TB, *testshop.Shop, uuid.UUID) error
		states [2]string
	}{
		{pausing, [2]string{"open", "paused"}},
		{resuming, [2]string{"paused", "open"}},
		{ending, [2]string{"open", "ended"}},
	} {
		before, after := change.states[0], change.states[1]
		require.ErrorIs(t, change.do(t, cutOff, sale.ID), catalog.ErrNotInForce)
		require.Equal(t, []string{after, after, before, after}, shardFields(t, s, sale, "state"))
		published, revision := publishedRevision(t, s, sale)
		require.Equal(t, []int64{int64(at + 1), int64(at + 2)}, []int64{published, revision})

		require.NoError(t, s.Distrust(t.Context(), sale.Layout().Partition(2)))
		_, err := s.PublishPending(t.Context())
		require.ErrorIs(t, err, reservation.ErrUnavailable, "its server is not verified")
		require.Equal(t, before, shardFields(t, s, sale, "state")[2])
		testkit.VerifyServer(t, s.Pool, s.Store, sale.Layout().Partition(2))
		n, err := s.PublishPending(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Equal(t, strings.Fields(strings.Repeat(after+" ", 4)), shardFields(t, s, sale, "state"))
		require.Equal(t, strings.Fields(strings.Repeat(fmt.Sprint(revision, " "), 4)), shardFields(t, s, sale, "revision"))
		published, _ = publishedRevision(t, s, sale)
		require.Equal(t, revision, published)
	}
}
