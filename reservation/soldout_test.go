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
