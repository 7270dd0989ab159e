package reservation_test

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
	"stampede/reservation/order"
)

// shardHas returns the number in a field of a shard.
func shardHas(t testing.TB, s *testshop.Shop, sale catalog.CountedSale, shard int, field string) int64 {
	t.Helper()
	n, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(sale.Layout().Partition(shard), sale.ID), field).Int64()
	require.NoError(t, err, field)
	return n
}

// usersIn returns n users of a shard.
func usersIn(sale catalog.CountedSale, shard, n int) (users []string) {
	for i := 0; len(users) < n; i++ {
		if user := "user-" + strconv.Itoa(i); sale.Layout().ShardOf(user) == shard {
			users = append(users, user)
		}
	}
	return users
}

// TestCrowdBuysWholeStockOfAllShards: two ingresses, and more buyers than units.
func TestCrowdBuysWholeStockOfAllShards(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 203, 8)
	ingresses := []*testshop.Shop{s, s.Next(t, s.Rdb)}
	var mu sync.Mutex
	places := map[int64]bool{}
	var refused atomic.Int64
	var crowd sync.WaitGroup
	for i := range 400 {
		crowd.Go(func() {
			user := fmt.Sprintf("user-%d", i)
			answer, err := ingresses[i%2].Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			switch {
			case err != nil:
				t.Errorf("%s: %v", user, err)
			case answer.Verdict == reservation.Reserved:
				mu.Lock()
				defer mu.Unlock()
				place := answer.Reservation.Sequence
				require.False(t, places[place], "place %d was given out twice", place)
				require.EqualValues(t, sale.Layout().ShardOf(user), (place-1)%8)
				places[place] = true
			default:
				require.Equal(t, reservation.SoldOut, answer.Verdict)
				refused.Add(1)
			}
		})
	}
	crowd.Wait()
	require.Len(t, places, 203)
	require.EqualValues(t, 197, refused.Load())
	var left, stock, sequence int64
	for shard := range 8 {
		left += shardHas(t, s, sale, shard, "left")
		stock += shardHas(t, s, sale, shard, "stock")
		sequence += (shardHas(t, s, sale, shard, "sequence") - int64(shard)) / 8
	}
	require.Equal(t, []int64{0, 203, 203}, []int64{left, stock, sequence})
	shown, err := s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 203}, []int64{shown.Available, shown.Held})
}

// One shard's users buy all units, and several at once.
func TestUsersOfOneShardBuyUnitsOfOthers(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 20, 4)
	buy := func(user string, units int64) reservation.Verdict {
		answer, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: units})
		require.NoError(t, err)
		return answer.Verdict
	}
	users := usersIn(sale, 2, 7)
	for _, user := range users[:3] {
		require.Equal(t, reservation.Reserved, buy(user, 5))
	}
	require.Equal(t, reservation.Reserved, buy(users[3], 3))
	require.Equal(t, reservation.SoldOut, buy(users[4], 3), "2 are left")
	require.Equal(t, reservation.Reserved, buy(users[5], 2))
	require.Equal(t, reservation.SoldOut, buy(users[6], 1))
	require.Equal(t, reservation.SoldOut, buy(usersIn(sale, 0, 1)[0], 1))
}

// What was given before a crash is taken by whoever comes next: a buyer, or a worker.
func TestUnitsOnTheirWayAreSold(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	for name, complete := range map[string]func(sale catalog.CountedSale){
		"by the buyer": func(catalog.CountedSale) {},
		"by a worker": func(sale catalog.CountedSale) {
			require.NoError(t, s.HelpUnits(t.Context(), sale.ID, sale.Layout(), 1))
			require.EqualValues(t, 4, shardHas(t, s, sale, 1, "left"))
			require.NoError(t, s.HelpUnits(t.Context(), sale.ID, sale.Layout(), 1), "again")
			require.EqualValues(t, 4, shardHas(t, s, sale, 1, "left"))
			require.ErrorIs(t, s.HelpUnits(t.Context(), sale.ID, sale.Layout(), 2), reservation.ErrUnavailable, "another epoch")
		},
	} {
		t.Run(name, func(t *testing.T) {
			sale := s.ShardedSale(t, 4, 2)
			giver := []string{s.Keys.Sale(sale.Layout().Partition(0), sale.ID)}
			give := redis.NewScript(lua.FencedBy("").Give.Source)
			require.Equal(t, "given 2", give.Run(t.Context(), s.Rdb, giver, 1, 1, 0, 1, "sold").Val())
			shown, err := s.Show(t.Context(), sale.ID)
			require.NoError(t, err)
			require.Equal(t, []int64{4, 0}, []int64{shown.Available, shown.Held}, "units on their way are available")
			complete(sale)
			for _, user := range usersIn(sale, 0, 4) {
				s.Buy(t, sale.ID, user)
			}
			require.Equal(t, reservation.SoldOut, s.Ask(t, sale.ID, usersIn(sale, 1, 1)[0]).Verdict)
		})
	}
}

// A shard that cannot be asked makes no buyer of another one hear that nothing is left.
func TestSilentShardIsNotSoldOut(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 4, 2)
	other := s.Next(t, s.Rdb)
	require.NoError(t, s.Distrust(t.Context(), sale.Layout().Partition(1)))
	users := usersIn(sale, 0, 4)
	for _, user := range users[:2] {
		s.Buy(t, sale.ID, user)
	}
	for _, shop := range []*testshop.Shop{s, other} {
		for _, user := range []string{users[2], usersIn(sale, 1, 1)[0]} {
			_, err := shop.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			require.ErrorIs(t, err, reservation.ErrUnavailable)
		}
	}
	found, err := other.FindReserved(t.Context(), s.Ask(t, sale.ID, users[0]).Reservation.OrderID, users[0])
	require.NoError(t, err, "an order of a shard that answers is found")
	require.EqualValues(t, 1, found.Quantity)
}

func TestOrdersOfAllShardsAreFoundAndReleased(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 8)
	other := s.Next(t, s.Rdb)
	var releases []reservation.Release
	for shard := range 8 {
		user := usersIn(sale, shard, 1)[0]
		id := s.Ask(t, sale.ID, user).Reservation.OrderID
		for _, shop := range []*testshop.Shop{s, other} {
			found, err := shop.FindReserved(t.Context(), id, user)
			require.NoError(t, err)
			require.Equal(t, sale.ID, found.SaleID)
		}
		releases = append(releases, reservation.Release{SaleID: sale.ID, OrderID: id, UserID: user, Quantity: 1})
	}
	require.NoError(t, s.Distrust(t.Context(), sale.Layout().Partition(3)))
	results, err := other.Release(t.Context(), releases)
	require.NoError(t, err)
	for shard, result := range results {
		if shard == 3 {
			require.Equal(t, reservation.ReleaseUnreached, result)
		} else {
			require.Equal(t, reservation.Released, result, "shard %d", shard)
		}
	}
	for shard := range 8 {
		require.NoError(t, s.Distrust(t.Context(), sale.Layout().Partition(shard)))
	}
	_, err = other.Release(t.Context(), releases)
	require.ErrorIs(t, err, reservation.ErrUnavailable)
}

// Every ingress hears within a second that units returned to any shard, and remembers until then.
func TestSoldOutIsRememberedOverAllShards(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 4)
	sale := s.ShardedSale(t, 4, 4)
	buyer := usersIn(sale, 3, 2)
	bought := s.Ask(t, sale.ID, buyer[0]).Reservation.OrderID
	for i := range 3 {
		s.Buy(t, sale.ID, usersIn(sale, i, 1)[0])
	}
	require.Equal(t, reservation.SoldOut, s.Ask(t, sale.ID, buyer[1]).Verdict)
	s.RememberSoldOut(t, sale.ID)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale.ID, buyer[0]).Verdict, "a buyer is not")
	released, err := s.Release(t.Context(),
		[]reservation.Release{{SaleID: sale.ID, OrderID: bought, UserID: buyer[0], Quantity: 1}})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
	testkit.Eventually(t, 30*time.Second, "the unit is sold to a user of another shard",
		func() bool { return s.Ask(t, sale.ID, usersIn(sale, 0, 2)[1]).Verdict == reservation.Reserved })
}

func TestLayoutSpreadsUsersAndUnits(t *testing.T) {
	t.Parallel()
	sale := uuid.Must(uuid.NewV7())
	for _, shards := range []int{1, 2, 3, 8, 64} {
		layout := reservation.LayoutOf(sale, 64, shards)
		counts := make([]int, shards)
		for i := range 64_000 {
			counts[layout.ShardOf("user-"+strconv.Itoa(i))]++
		}
		seen := map[int]bool{}
		for shard, n := range counts {
			require.InEpsilon(t, 64_000/shards, n, 0.15, "shard %d of %d", shard, shards)
			p := layout.Partition(shard)
			require.False(t, seen[p])
			seen[p] = true
			back, ok := layout.ShardIn(p)
			require.True(t, ok)
			require.Equal(t, shard, back)
			first := layout.FirstSequence(1000, shard)
			require.EqualValues(t, shard, first%int64(shards))
			require.GreaterOrEqual(t, first, int64(1000))
			require.Less(t, first, int64(1000+2*shards))
		}
		for _, units := range []int64{0, 1, 63, 64, 1001, -5, -64} {
			var sum int64
			for shard := range shards {
				share := layout.Share(units, shard)
				require.LessOrEqual(t, max(share, -share), max(units, -units)/int64(shards)+1)
				sum += share
			}
			require.Equal(t, units, sum)
		}
	}
}

// A shard without units gets back a returned one, which is quiet for a second. Its users buy units of other shards
// meanwhile: those were never sold out.
func TestReturnedUnitHidesNoUnitsOfOtherShards(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 12, 4)
	users := usersIn(sale, 0, 2)
	answer, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: users[0], Quantity: 3})
	require.NoError(t, err)
	require.Zero(t, shardHas(t, s, sale, 0, "left"))
	released, err := s.Release(t.Context(), []reservation.Release{
		{SaleID: sale.ID, OrderID: answer.Reservation.OrderID, UserID: users[0], Quantity: 3},
	})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
	s.Buy(t, sale.ID, users[1])
}

// An order of several items gets those that its shard lacks from others, and all of its lines or none.
func TestBasketsGetItemsOfOtherShards(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedItems(t, 4, reservation.Item{Code: "s", Stock: 1}, reservation.Item{Code: "m", Stock: 8},
		reservation.Item{Code: "l", Stock: 3})
	var shares []int64
	for shard := range 4 {
		for _, field := range []string{"stock.a", "stock.b", "stock.c", "stock"} {
			shares = append(shares, shardHas(t, s, sale, shard, field))
		}
	}
	require.Equal(t, []int64{1, 2, 1, 4, 0, 2, 0, 2, 0, 2, 1, 3, 0, 2, 1, 3}, shares, "of each item evenly")
	users := usersIn(sale, 1, 9)
	basket := map[string]int64{"s": 1, "m": 3, "l": 2}
	answer := wantItems(t, s, sale.ID, users[0], "", basket)
	require.Equal(t, reservation.Reserved, answer.Verdict, "its shard had 2 m")
	require.Equal(t, map[string]int64{"": 6, "a": 0, "b": 5, "c": 1}, s.LeftItems(t, sale.Sale))
	answer = wantItems(t, s, sale.ID, users[1], "", map[string]int64{"m": 5, "l": 2, "s": 1})
	require.Equal(t, []any{reservation.SoldOut, []string{"s", "l"}, order.Items(`{"s":0,"m":5,"l":1}`)},
		[]any{answer.Verdict, answer.Of.Codes, answer.Of.Units}, "what falls short, and what is left in all shards")
	for i, want := range []map[string]int64{{"m": 3, "l": 1}, {"m": 2}} {
		require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, users[2+i], "", want).Verdict)
	}
	require.Equal(t, map[string]int64{"": 0, "a": 0, "b": 0, "c": 0}, s.LeftItems(t, sale.Sale))
	shown, err := s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 12}, []int64{shown.Available, shown.Held})

	released, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale.ID, OrderID: wantItems(t, s, sale.ID, users[0], "", basket).Reservation.OrderID, UserID: users[0],
		Quantity: 6, Lines: "a1b3c2",
	}})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
	shown, err = s.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	for i, available := range []int64{1, 3, 2} {
		require.Equal(t, available, shown.Items[i].Available)
	}
	testkit.Eventually(t, 30*time.Second, "a user of another shard gets the rare item", func() bool {
		return wantItems(t, s, sale.ID, usersIn(sale, 3, 1)[0], "", map[string]int64{"s": 1, "l": 2}).Verdict ==
			reservation.Reserved
	})
}

// A shard that cannot be asked may have units of the item.
func TestSilentShardIsNotSoldOutOfItem(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedItems(t, 2, reservation.Item{Code: "s", Stock: 2}, reservation.Item{Code: "m", Stock: 4})
	require.NoError(t, s.Distrust(t.Context(), sale.Layout().Partition(1)))
	users := usersIn(sale, 0, 4)
	require.Equal(t, reservation.Reserved,
		wantItems(t, s, sale.ID, users[0], "", map[string]int64{"s": 1, "m": 1}).Verdict)
	for _, shop := range []*testshop.Shop{s, s.Next(t, s.Rdb)} {
		for _, want := range []map[string]int64{{"s": 1}, {"m": 2}, {"s": 1, "m": 1}} {
			_, err := shop.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: users[1], Items: want})
			require.ErrorIs(t, err, reservation.ErrUnavailable)
		}
	}
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, users[2], "", map[string]int64{"m": 1}).Verdict)
}

// Each ingress remembers an item until a unit comes to any shard, whatever happens to other items.
func TestSoldOutItemIsRememberedOverAllShards(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 4)
	sale := s.ShardedItems(t, 4, reservation.Item{Code: "s", Stock: 2}, reservation.Item{Code: "m", Stock: 40})
	rare, buyer := map[string]int64{"s": 1}, usersIn(sale, 3, 1)[0]
	bought := wantItems(t, s, sale.ID, buyer, "", rare).Reservation.OrderID
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, usersIn(sale, 2, 1)[0], "", rare).Verdict)
	rememberSold(t, s, sale.Sale, "s")
	other := wantItems(t, s, sale.ID, usersIn(sale, 1, 1)[0], "", map[string]int64{"m": 10}).Reservation
	release := func(user string, order uuid.UUID, lines order.Lines) {
		released, err := s.Release(t.Context(), []reservation.Release{
			{SaleID: sale.ID, OrderID: order, UserID: user, Quantity: lines.Units(), Lines: lines},
		})
		require.NoError(t, err)
		require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
	}
	release(usersIn(sale, 1, 1)[0], other.OrderID, "b10")
	rememberSold(t, s, sale.Sale, "s")
	require.Equal(t, reservation.AlreadyPurchased, wantItems(t, s, sale.ID, buyer, "", rare).Verdict, "a buyer is not")
	release(buyer, bought, "a1")
	testkit.Eventually(t, 30*time.Second, "the unit is sold to a user of another shard", func() bool {
		return wantItems(t, s, sale.ID, usersIn(sale, 0, 1)[0], "", rare).Verdict == reservation.Reserved
	})
}

// An item that is sold out in one shard is not remembered with one that is so in all.
func TestItemLeftInOneShardIsNotRemembered(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 2)
	sale := s.ShardedItems(t, 2, reservation.Item{Code: "s", Stock: 2}, reservation.Item{Code: "m", Stock: 1})
	users := usersIn(sale, 0, 3)
	for i, code := range []string{"s", "m"} {
		require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, users[i], "", map[string]int64{code: 1}).Verdict)
	}
	rememberSold(t, s, sale.Sale, "m")
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, users[2], "", map[string]int64{"s": 1}).Verdict)
}

// A unit returns to a shard that is counted, and one is sold in a shard that is not yet. Two units were for sale all
// the time, and the count shows one.
func TestOneCountDoesNotProveThatTooLittleIsLeft(t *testing.T) {
	t.Parallel()
	for name, items := range map[string][]reservation.Item{
		"stock": nil, "item": {{Code: "m", Stock: 6}, {Code: "l", Stock: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShardedShop(t)
			sale, lines := catalog.CountedSale{}, order.Lines("")
			if items == nil {
				sale = s.ShardedSale(t, 6, 2)
			} else {
				sale, lines = s.ShardedItems(t, 2, items...), "a1"
			}
			want := func(shop *testshop.Shop, user string, units int64) reservation.Answer {
				r := reservation.Request{Sale: sale.ID, User: user, Quantity: units}
				if items != nil {
					r.Quantity, r.Items = 0, map[string]int64{"m": units}
				}
				answer, err := shop.Reserve(t.Context(), r)
				require.NoError(t, err)
				require.Equal(t, reservation.Reserved, answer.Verdict)
				return answer
			}
			first, second := usersIn(sale, 0, 3), usersIn(sale, 1, 3)
			returned := want(s, first[0], 1).Reservation.OrderID
			for _, user := range []string{first[1], second[0], second[1]} {
				want(s, user, 1)
			}
			counted := make(chan struct{})
			var change, count sync.Once
			rdb := testkit.Client(t, testkit.RedisURL(t))
			rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
				ofCount := 6 + min(1, len(items)) // arguments
				args := cmd.Args()
				switch isCount := cmd.Name() == "evalsha" && len(args) == ofCount && args[2] == 1; {
				case isCount && args[3] == s.Keys.Sale(sale.Layout().Partition(0), sale.ID):
					defer count.Do(func() { close(counted) })
				case isCount:
					<-counted
					change.Do(func() {
						released, err := s.Release(t.Context(), []reservation.Release{
							{SaleID: sale.ID, OrderID: returned, UserID: first[0], Quantity: 1, Lines: lines},
						})
						require.NoError(t, err)
						require.Equal(t, []reservation.ReleaseResult{reservation.Released}, released)
						want(s, second[2], 1)
					})
				}
				return next(ctx, cmd)
			}))
			want(s.Next(t, rdb), first[2], 2)
			left := "left"
			if items != nil {
				left = "left.a"
			}
			require.Zero(t, shardHas(t, s, sale, 1, left), "the change came between the two")
		})
	}
}

// One shard is set back to an earlier state, as no Redis does that keeps its process: its units were sold meanwhile. An
// ingress that has sold later places distrusts it, and from then on nobody sells from it, or hears that nothing is
// left.
func TestSetBackShardSellsNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 2)
	other := s.Next(t, s.Rdb)
	partition := sale.Layout().Partition(0)
	keys := []string{s.Keys.Sale(partition, sale.ID), s.Keys.Buyers(partition, sale.ID)}
	users, others := usersIn(sale, 0, 6), usersIn(sale, 1, 6)
	s.Buy(t, sale.ID, users[0])
	var dumps []string
	for _, key := range keys {
		dump, err := s.Rdb.Dump(t.Context(), key).Result()
		require.NoError(t, err)
		dumps = append(dumps, dump)
	}
	for _, user := range append(others[:4:4], users[1:3]...) {
		s.Buy(t, sale.ID, user)
	}
	for i, key := range keys {
		require.NoError(t, s.Rdb.RestoreReplace(t.Context(), key, 0, dumps[i]).Err())
	}
	before := lookNow(t, s, sale.Sale)
	_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: users[3], Quantity: 1})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	for _, ingress := range []*testshop.Shop{s, other} {
		for _, user := range []string{users[4], others[4]} {
			_, err := ingress.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			require.ErrorIs(t, err, reservation.ErrUnavailable, user)
		}
		require.ErrorIs(t, ingress.HelpUnits(t.Context(), sale.ID, sale.Layout(), 1), reservation.ErrUnavailable)
	}
	require.Equal(t, before, lookNow(t, s, sale.Sale))
}

// A shard that forgot what it gave would give the same units again.
func TestShardThatForgotAGiftIsDistrusted(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 8, 2)
	users, ctx := usersIn(sale, 0, 8), t.Context()
	giver := sale.Layout().Partition(1)
	before, err := s.Rdb.Dump(ctx, s.Keys.Sale(giver, sale.ID)).Result()
	require.NoError(t, err)
	for _, user := range users[:5] {
		s.Buy(t, sale.ID, user)
	}
	// The count that shows the gift.
	_, err = s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: users[5], Quantity: 4})
	require.NoError(t, err)
	require.NoError(t, s.Rdb.RestoreReplace(ctx, s.Keys.Sale(giver, sale.ID), 0, before).Err())
	_, err = s.Reserve(ctx, reservation.Request{Sale: sale.ID, User: users[6], Quantity: 4})
	require.ErrorIs(t, err, reservation.ErrUnavailable)
	state, err := s.Inspect(ctx, giver)
	require.NoError(t, err)
	require.False(t, state.Known, "its server is distrusted")
}

// TestPartitionNamesAreUnique: they never change either, so that data in Redis is found again.
func TestPartitionNamesAreUnique(t *testing.T) {
	t.Parallel()
	keys := reservation.Keys{Prefix: "test", Partitions: reservation.MaxPartitions}
	require.Equal(t, "test:{0}:orders", keys.Orders(0))
	require.Equal(t, "test:{1ac}:orders", keys.Orders(1))
	seen := make(map[string]bool)
	for p := range reservation.MaxPartitions {
		name := keys.Orders(p)
		require.False(t, seen[name], name)
		require.Equal(t, 1, strings.Count(name, "{"), name)
		seen[name] = true
	}
}

// Each kind of key is in the list of keys, with its parts: a partition, a sale, a user, a target, a token.
func TestEachKeyIsInTheListOfKeys(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/data.md")
	require.NoError(t, err)
	page := strings.ReplaceAll(string(text), "`…:", "`stampede:{p}:")
	page = regexp.MustCompile(`<[a-z]+>`).ReplaceAllString(page, "<part>")
	sale := uuid.Must(uuid.NewV7())
	keys := reflect.ValueOf(reservation.Keys{Prefix: "stampede", Partitions: 1})
	seen := 0
	for i := range keys.NumMethod() {
		method := keys.Method(i)
		if method.Type().NumOut() != 1 || method.Type().Out(0).Kind() != reflect.String {
			continue
		}
		var args []reflect.Value
		for n := range method.Type().NumIn() {
			switch in := method.Type().In(n); in {
			case reflect.TypeFor[uuid.UUID]():
				args = append(args, reflect.ValueOf(sale))
			case reflect.TypeFor[string]():
				args = append(args, reflect.ValueOf("<part>"))
			default:
				args = append(args, reflect.Zero(in))
			}
		}
		key := strings.NewReplacer("{0}", "{p}", sale.String(), "<part>").Replace(method.Call(args)[0].String())
		require.Regexp(t, "(?m)^\\|.*`"+regexp.QuoteMeta(key)+"(`|:…`)", page)
		seen++
	}
	require.Greater(t, seen, 10)
}
