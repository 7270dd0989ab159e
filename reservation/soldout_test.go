package reservation_test

import (
	"fmt"
	"regexp"
	"runtime"
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
	"stampede/reservation/order"
)

func TestSoldOutAnswersCostRedisNothing(t *testing.T) {
	t.Parallel()
	s, sale := testshop.SoldOutShop(t)
	usedBefore, callsBefore := usedMemory(t, s.Rdb), testshop.ScriptCalls(t, s.Rdb)

	const losers = 1_000_000
	workers := runtime.GOMAXPROCS(0)
	var answered atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < losers; i += workers {
				a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: fmt.Sprintf("loser-%d", i), Quantity: 1})
				if err == nil && a.Verdict == reservation.SoldOut {
					answered.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, losers, answered.Load())
	// A process that was paused for long may have to check once more.
	require.LessOrEqual(t, testshop.ScriptCalls(t, s.Rdb)-callsBefore, losers/1000)
	require.InDelta(t, usedBefore, usedMemory(t, s.Rdb), 256<<10, "bytes of Redis before and after a million refusals")
}

func usedMemory(t *testing.T, rdb redis.UniversalClient) int64 {
	t.Helper()
	var used int64
	stats, err := rdb.InfoMap(t.Context(), "memory").Result()
	require.NoError(t, err)
	_, err = fmt.Sscan(stats["Memory"]["used_memory"], &used)
	require.NoError(t, err)
	return used
}

// Returned units are quiet for as long in each script, and longer than an ingress remembers that nothing is left.
func TestQuietTimeIsTheSameInAllScripts(t *testing.T) {
	t.Parallel()
	scripts := lua.FencedBy("")
	for _, script := range []lua.FencedScript{scripts.Reserve, scripts.Count, scripts.Give} {
		found := regexp.MustCompile(`(?m)^local quiet_ms = (\d+)`).FindStringSubmatch(script.Source)
		require.Len(t, found, 2)
		require.Equal(t, "1000", found[1])
	}
	require.Less(t, reservation.SoldOutTrust, time.Second)
}

func TestBuyerOfSoldOutSaleGetsOrder(t *testing.T) {
	t.Parallel()
	s, sale := testshop.SoldOutShop(t)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale, "ann").Verdict)
	other := testshop.NewShopOn(t, testshop.Options{Redis: s.Rdb, Keys: s.Keys})
	other.RememberSoldOut(t, sale)
	require.Equal(t, reservation.AlreadyPurchased, other.Ask(t, sale, "ann").Verdict, "on another ingress")
}

func TestSoldOutMemoryEndsWithinASecondOnEveryIngress(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(s *testshop.Shop, sale uuid.UUID){
		"restock": func(s *testshop.Shop, sale uuid.UUID) {
			_, err := s.Restock(t.Context(), sale, 1, "")
			require.NoError(t, err)
		},
		"release": func(s *testshop.Shop, sale uuid.UUID) {
			held := s.Ask(t, sale, "ann").Reservation
			_, err := s.Release(t.Context(), []reservation.Release{{SaleID: sale, OrderID: held.OrderID, UserID: "ann"}})
			require.NoError(t, err)
		},
		"resume": func(s *testshop.Shop, sale uuid.UUID) {
			_, err := s.Pause(t.Context(), sale)
			require.NoError(t, err)
			_, err = s.Restock(t.Context(), sale, 1, "")
			require.NoError(t, err)
			_, err = s.Resume(t.Context(), sale)
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, sale := testshop.SoldOutShop(t)
			// Another ingress, which learns of the change only from Redis.
			ingress := testshop.NewShopOn(t, testshop.Options{Redis: s.Rdb, Keys: s.Keys})
			ingress.RememberSoldOut(t, sale)

			change(s, sale)
			changed := time.Now()
			for {
				asked := time.Now()
				if ingress.Ask(t, sale, "bob").Verdict == reservation.Reserved {
					break
				}
				// A second, and as long again for a slow machine.
				require.Less(t, asked.Sub(changed), 2*time.Second, "the sale is still remembered as sold out")
			}
		})
	}
}

func TestEndedSaleIsNotAnsweredSoldOut(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	closesAt := time.Now().Add(4 * time.Second)
	sale, err := s.Create(t.Context(), reservation.Terms{Name: "short", Stock: 1, PerOrderLimit: 1, ClosesAt: closesAt})
	require.NoError(t, err)
	s.Buy(t, sale.ID, "ann")
	require.Equal(t, reservation.SoldOut, s.Ask(t, sale.ID, "bob").Verdict)
	testkit.Eventually(t, 20*time.Second, "the sale has ended", func() bool {
		asked := time.Now()
		if s.Ask(t, sale.ID, "bob").Verdict == reservation.Ended {
			return true
		}
		require.Less(t, asked, closesAt.Add(time.Second))
		return false
	})
	require.GreaterOrEqual(t, time.Now(), closesAt)
	require.Equal(t, reservation.Ended, s.Ask(t, sale.ID, "bob").Verdict, "later requests, too")
}

// One ingress remembers the sale as sold out while another one sells a returned unit.
func TestBuyerOfReturnedUnitIsNotAnsweredSoldOut(t *testing.T) {
	t.Parallel()
	for name, returnUnit := range map[string]func(s *testshop.Shop, sale reservation.Sale, held order.Reservation){
		"release": func(s *testshop.Shop, sale reservation.Sale, held order.Reservation) {
			_, err := s.Release(t.Context(), []reservation.Release{{SaleID: sale.ID, OrderID: held.OrderID, UserID: "ann"}})
			require.NoError(t, err)
		},
		"restock": func(s *testshop.Shop, sale reservation.Sale, _ order.Reservation) {
			_, err := s.Restock(t.Context(), sale.ID, 1, "")
			require.NoError(t, err)
		},
		"rebuild": func(s *testshop.Shop, sale reservation.Sale, _ order.Reservation) { rebuild(t, s, sale, 2) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, sale := testshop.SoldOutShop(t)
			counted, err := s.Show(t.Context(), sale)
			require.NoError(t, err)
			held := s.Ask(t, sale, "ann").Reservation
			selling := s.Next(t, s.Rdb) // without a memory of sold-out sales
			bob := reservation.Request{Sale: sale, User: "bob", Quantity: 1, IdempotencyKey: "k"}
			s.RememberSoldOut(t, sale)
			returnUnit(s, counted.Sale, held)
			testkit.Eventually(t, 30*time.Second, "the unit is sold", func() bool {
				answer, err := selling.Reserve(t.Context(), bob)
				require.NoError(t, err)
				return answer.Verdict == reservation.Reserved
			})
			answer, err := s.Reserve(t.Context(), bob)
			require.NoError(t, err)
			require.Equal(t, reservation.Replayed, answer.Verdict)
		})
	}
}

// The memory of a sold-out sale includes the keys of ended orders.
func TestSoldOutMemoryKeepsKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, testkit.OwnRedis(t).URL)})
	sale := s.Sale(t, 1).ID
	request := reservation.Request{Sale: sale, User: "ann", Quantity: 1, IdempotencyKey: "k"}
	made, err := s.Reserve(t.Context(), request)
	require.NoError(t, err)
	o := made.Reservation.OrderID
	_, err = s.Release(
		t.Context(), []reservation.Release{
			{SaleID: sale, OrderID: o, UserID: "ann", Quantity: 1, Status: order.StatusExpired},
		},
	)
	require.NoError(t, err)
	testkit.Eventually(
		t, 30*time.Second, "the unit is sold again",
		func() bool { return s.Ask(t, sale, "bob").Verdict == reservation.Reserved },
	)
	for _, ingress := range []*testshop.Shop{s, s.Next(t, s.Rdb)} {
		ingress.RememberSoldOut(t, sale)
		again, err := ingress.Reserve(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, reservation.Answer{
			Verdict: reservation.OrderEnded, Status: order.StatusExpired,
			Reservation: order.Reservation{OrderID: o, Quantity: 1, Epoch: 1},
		}, again)
	}
}

func wantItems(
	t *testing.T, s *testshop.Shop, sale uuid.UUID, user, key string, items map[string]int64,
) reservation.Answer {
	t.Helper()
	a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, IdempotencyKey: key, Items: items})
	require.NoError(t, err)
	return a
}

func TestAnswersNameItems(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenItems(t, 4,
		reservation.Item{Code: "m", Stock: 3, PerOrderLimit: 2}, reservation.Item{Code: "l", Stock: 1})
	ann := wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"l": 1, "m": 2})
	require.Equal(t, reservation.Reserved, ann.Verdict)
	require.Equal(t, order.Lines("a2b1"), ann.Reservation.Lines)
	require.Equal(t, order.Items(`{"m":2,"l":1}`), ann.Of.Units)
	require.EqualValues(t, 3, ann.Reservation.Quantity)
	again := wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"m": 2, "l": 1})
	ann.Verdict = reservation.Replayed
	require.Equal(t, ann, again)
	require.Equal(t, reservation.KeyReused, wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"m": 3}).Verdict)

	require.Equal(t, reservation.Answer{
		Verdict: reservation.OverLimit, Limit: 2, Of: &reservation.OfItems{Codes: []string{"m"}},
	}, wantItems(t, s, sale.ID, "bob", "", map[string]int64{"m": 3}))
	require.Equal(t, reservation.Answer{Verdict: reservation.OverLimit, Limit: 4},
		wantItems(t, s, sale.ID, "bob", "", map[string]int64{"m": 1 << 60, "l": 1 << 60}))
	require.Equal(t, reservation.Answer{
		Verdict: reservation.UnknownItem, Of: &reservation.OfItems{Codes: []string{"L", "xl"}},
	}, wantItems(t, s, sale.ID, "bob", "", map[string]int64{"m": 1, "xl": 1, "L": 1}))
	// The last question: from now on an ingress may answer for the sold-out item without Redis.
	require.Equal(t, reservation.Answer{
		Verdict: reservation.SoldOut, Of: &reservation.OfItems{Units: `{"m":1,"l":0}`, Codes: []string{"l"}},
	}, wantItems(t, s, sale.ID, "bob", "", map[string]int64{"m": 1, "l": 1}))
	plain := s.Open(t, 1)
	for _, r := range []reservation.Request{
		{Sale: sale.ID, Quantity: 1},
		{Sale: plain, Items: map[string]int64{"m": 1}},
		{Sale: sale.ID, Items: map[string]int64{}},
		{Sale: sale.ID, Items: map[string]int64{"m": 1, "l": 0}},
		{Sale: sale.ID, Items: map[string]int64{"m": -1}},
		{Sale: sale.ID, Quantity: 1, Items: map[string]int64{"m": 1}},
	} {
		r.User = "bob"
		_, err := s.Reserve(t.Context(), r)
		var invalid *order.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "items", invalid.Field)
	}

	events := s.Events(t, 0)
	require.Len(t, events, 1)
	require.Equal(t, order.Lines("a2b1"), events[0].Lines)
	id := ann.Reservation.OrderID
	for _, ingress := range []*testshop.Shop{s, s.Next(t, s.Rdb)} {
		found, err := ingress.FindReserved(t.Context(), id, "ann")
		require.NoError(t, err)
		require.Equal(t, ann.Reservation.Lines, found.Lines)
		require.Equal(t, ann.Of.Units, found.Items)
	}
	appended, err := s.AppendReserved(t.Context(), 0, sale.ID, events)
	require.NoError(t, err)
	require.Equal(t, []bool{true}, appended)
	require.Equal(t, []order.OrderReserved{events[0], events[0]}, s.Events(t, 0))

	result, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale.ID, OrderID: id, UserID: "ann", Quantity: 3, Lines: "a2b1", Status: order.StatusExpired,
	}})
	require.NoError(t, err)
	require.Equal(t, []reservation.ReleaseResult{reservation.Released}, result)
	require.Equal(t, reservation.Answer{
		Verdict: reservation.OrderEnded, Status: order.StatusExpired, Of: ann.Of,
		Reservation: order.Reservation{OrderID: id, Quantity: 3, Lines: "a2b1", Epoch: 1},
	}, wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"l": 1, "m": 2}))
	require.Equal(t, map[string]int64{"": 4, "a": 3, "b": 1}, s.LeftItems(t, sale))
}

// 64 buyers want two of three items each.
func TestNoOrderHasOnlySomeOfItsLines(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenItems(t, 2, reservation.Item{Code: "a", Stock: 3}, reservation.Item{Code: "b", Stock: 3},
		reservation.Item{Code: "c", Stock: 3})
	pairs := []map[string]int64{{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"c": 1, "a": 1}}
	want := []order.Lines{"a1b1", "b1c1", "a1c1"}
	var buyers sync.WaitGroup
	for i := range 64 {
		user := fmt.Sprintf("user-%d", i)
		for range 2 { // a buyer sends two baskets at once
			buyers.Go(func() {
				a, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Items: pairs[i%3]})
				if err != nil || a.Verdict == reservation.Reserved && a.Reservation.Lines != want[i%3] {
					t.Errorf("%s: %v, %+v", user, err, a)
				}
			})
		}
	}
	buyers.Wait()
	users, held := map[string]bool{}, map[int]int64{}
	for _, e := range s.Events(t, 0) {
		require.False(t, users[e.UserID], "a second order of %s", e.UserID)
		users[e.UserID] = true
		require.Contains(t, want, e.Lines)
		for place, units := range e.Lines.Each() {
			held[place] += units
		}
	}
	left := s.LeftItems(t, sale)
	some := 0
	for place, item := range sale.Items {
		letter := order.ItemLetter(place)
		require.Equal(t, item.Stock, left[letter]+held[place], "units of %s", item.Code)
		if left[letter] > 0 {
			some++
		}
	}
	require.Less(t, some, 2, "a pair is left that somebody wanted: %v", left)
	require.Equal(t, left[""], left["a"]+left["b"]+left["c"])
}

// soldItem returns a shop on a Redis of its own that remembers one of two items as sold out: ann has it, and bob
// another.
func soldItem(t *testing.T) (*testshop.Shop, reservation.Sale) {
	t.Helper()
	s := testshop.NewShopOn(t, testshop.Options{Redis: testkit.Client(t, testkit.OwnRedis(t).URL)})
	sale := s.OpenItems(t, 2, reservation.Item{Code: "s", Stock: 1}, reservation.Item{Code: "m", Stock: 100})
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 1}).Verdict)
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, "bob", "", map[string]int64{"m": 1}).Verdict)
	rememberSold(t, s, sale, "s")
	return s, sale
}

// rememberSold waits until the store refuses an item without a call of Redis.
func rememberSold(t *testing.T, s *testshop.Shop, sale reservation.Sale, code string) {
	t.Helper()
	testkit.Eventually(t, testshop.Soon, code+" is remembered as sold out", func() bool {
		before := testshop.ScriptCalls(t, s.Rdb)
		a := wantItems(t, s, sale.ID, "loser", "", map[string]int64{code: 1})
		require.Equal(t, reservation.SoldOut, a.Verdict)
		require.Equal(t, []string{code}, a.Of.Codes)
		require.NotEmpty(t, a.Of.Units)
		return testshop.ScriptCalls(t, s.Rdb) == before
	})
}

func TestOtherItemsAreSoldWhileOneIsRememberedAsSoldOut(t *testing.T) {
	t.Parallel()
	s, sale := soldItem(t)
	one := func(code string) map[string]int64 { return map[string]int64{code: 1} }
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, "cid", "", one("m")).Verdict)
	require.Equal(t, reservation.Replayed, wantItems(t, s, sale.ID, "ann", "k", one("s")).Verdict)
	for _, user := range []string{"ann", "bob", "cid"} {
		require.Equal(t, reservation.AlreadyPurchased, wantItems(t, s, sale.ID, user, "", one("s")).Verdict, user)
	}
	require.Equal(t, reservation.SoldOut,
		wantItems(t, s, sale.ID, "dan", "", map[string]int64{"s": 1, "m": 1}).Verdict, "no part of an order")

	// Who buys through another ingress is known after the next scan.
	other := s.Next(t, s.Rdb)
	require.Equal(t, reservation.Reserved, wantItems(t, other, sale.ID, "eve", "", one("m")).Verdict)
	testkit.Eventually(t, testshop.Soon, "eve is known", func() bool {
		return wantItems(t, s, sale.ID, "eve", "", one("s")).Verdict == reservation.AlreadyPurchased
	})

	// Another item sells out.
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale.ID), "left.b", 0, "left", 0).Err())
	rememberSold(t, s, sale, "m")
}

// One ingress remembers the item as sold out while another one sells a returned unit.
func TestBuyerOfReturnedItemIsNotAnsweredSoldOut(t *testing.T) {
	t.Parallel()
	s, sale := soldItem(t)
	held := wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 1}).Reservation
	selling := s.Next(t, s.Rdb)
	_, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale.ID, OrderID: held.OrderID, UserID: "ann", Quantity: 1, Lines: held.Lines, Status: order.StatusExpired,
	}})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, wantItems(t, s, sale.ID, "fay", "", map[string]int64{"m": 1}).Verdict)
	released := time.Now()
	testkit.Eventually(t, testshop.Soon, "the unit is sold", func() bool {
		return wantItems(t, selling, sale.ID, "dan", "k", map[string]int64{"s": 1}).Verdict == reservation.Reserved
	})
	require.GreaterOrEqual(t, time.Since(released), 900*time.Millisecond)
	require.Equal(t, reservation.Replayed, wantItems(t, s, sale.ID, "dan", "k", map[string]int64{"s": 1}).Verdict)
	require.Equal(t, reservation.OrderEnded, wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 1}).Verdict)
	rememberSold(t, s, sale, "s")
	require.Equal(t, reservation.OrderEnded, wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 1}).Verdict)
}

func TestRebuiltSaleSellsItsItems(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenItems(t, 3,
		reservation.Item{Code: "s", Stock: 2}, reservation.Item{Code: "m", Stock: 3, PerOrderLimit: 1})
	before := s.SaleInRedis(t, sale.ID)
	held := wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 2, "m": 1}).Reservation
	_, err := s.CloseSale(t.Context(), sale.ID, 0, testshop.Token, 1)
	require.NoError(t, err)
	require.NoError(t, s.StageBuyers(t.Context(), 0, sale.ID, testshop.Token, 2, []reservation.Holder{
		{User: "ann", Reservation: held, KeyFingerprint: reservation.Request{IdempotencyKey: "k"}.KeyFingerprint(), Epoch: 1},
	}))
	require.NoError(t, s.StageEnded(t.Context(), 0, sale.ID, testshop.Token, []reservation.EndedOrder{{
		User: "bob", KeyFingerprint: reservation.Request{IdempotencyKey: "k"}.KeyFingerprint(),
		OrderID: order.NewOrderID(sale.ID), Quantity: 1, Lines: "b1", Status: order.StatusExpired,
	}}))
	sale.Epoch = 2
	require.NoError(t, s.OpenRebuilt(t.Context(), reservation.Rebuilt{
		Sale: sale, Left: 2, Held: 3, LeftItems: []int64{0, 2}, HeldItems: []int64{2, 1}, LastPlace: 1, Holders: 1, Ended: 1,
		Token: testshop.Token,
	}))
	require.Equal(t, map[string]int64{"": 2, "a": 0, "b": 2}, s.LeftItems(t, sale))
	after := s.SaleInRedis(t, sale.ID)
	for _, field := range []string{
		"items", "stock", "stock.a", "stock.b", "limit", "limit.a", "limit.b", "per_order_limit",
	} {
		require.Equal(t, before[field], after[field], field)
	}
	require.Equal(t, reservation.Replayed,
		wantItems(t, s, sale.ID, "ann", "k", map[string]int64{"s": 2, "m": 1}).Verdict)
	ended := wantItems(t, s, sale.ID, "bob", "k", map[string]int64{"m": 1})
	require.Equal(t, []any{reservation.OrderEnded, order.Items(`{"m":1}`)}, []any{ended.Verdict, ended.Of.Units})
}

// Each of two shards has one of the last two items, and users of both want both of them. One gets them.
func TestBasketsOfTwoShardsDoNotBlockEachOther(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	for range 20 {
		sale := s.ShardedItems(t, 2, reservation.Item{Code: "s", Stock: 1}, reservation.Item{Code: "m", Stock: 1})
		var verdicts [2]reservation.Verdict
		var both sync.WaitGroup
		for shard := range verdicts {
			both.Go(func() {
				verdicts[shard] = wantItems(t, s, sale.ID, usersIn(sale, shard, 1)[0], "", map[string]int64{"s": 1, "m": 1}).Verdict
			})
		}
		both.Wait()
		require.ElementsMatch(t, []reservation.Verdict{reservation.Reserved, reservation.SoldOut}, verdicts[:])
	}
}
