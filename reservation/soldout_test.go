package reservation_test

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

// soldOutShop is a shop on a Redis of its own, whose sale has one unit, which ann has, and knows it.
func soldOutShop(t *testing.T) (*shop, uuid.UUID) {
	t.Helper()
	own := testkit.OwnRedis(t)
	s := newShopOn(t, ownClient(t, own.URL), testkit.Keys(t), reservation.StoreOptions{})
	sale := s.sale(1).ID
	require.Equal(t, reservation.Reserved, s.buy(sale, "ann").Verdict)
	s.rememberSoldOut(sale)
	return s, sale
}

// rememberSoldOut waits until losers cost Redis nothing.
func (s *shop) rememberSoldOut(sale uuid.UUID) {
	s.t.Helper()
	testkit.Eventually(s.t, 10*time.Second, "the sale is remembered as sold out", func() bool {
		before := scriptCalls(s.t, s.rdb)
		require.Equal(s.t, reservation.SoldOut, s.buy(sale, "loser").Verdict)
		return scriptCalls(s.t, s.rdb) == before
	})
}

func scriptCalls(t *testing.T, rdb *redis.Client) int {
	t.Helper()
	calls := 0
	stats, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, section := range stats {
		if line := section["cmdstat_evalsha"]; line != "" {
			_, err := fmt.Sscanf(line, "calls=%d,", &calls)
			require.NoError(t, err)
		}
	}
	return calls
}

func TestSoldOutAnswersCostRedisNothing(t *testing.T) {
	t.Parallel()
	s, sale := soldOutShop(t)
	usedBefore, callsBefore := usedMemory(t, s.rdb), scriptCalls(t, s.rdb)

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
	// A process that was held up for long may have had to look once more.
	require.LessOrEqual(t, scriptCalls(t, s.rdb)-callsBefore, losers/1000)
	require.InDelta(t, usedBefore, usedMemory(t, s.rdb), 256<<10, "bytes of Redis before and after a million losers")
}

func usedMemory(t *testing.T, rdb *redis.Client) int64 {
	t.Helper()
	var used int64
	stats, err := rdb.InfoMap(t.Context(), "memory").Result()
	require.NoError(t, err)
	_, err = fmt.Sscan(stats["Memory"]["used_memory"], &used)
	require.NoError(t, err)
	return used
}

func TestBuyerOfSoldOutSaleGetsOrder(t *testing.T) {
	t.Parallel()
	s, sale := soldOutShop(t)
	require.Equal(t, reservation.AlreadyPurchased, s.buy(sale, "ann").Verdict)
	other := newShopOn(t, s.rdb, s.keys, reservation.StoreOptions{})
	other.rememberSoldOut(sale)
	require.Equal(t, reservation.AlreadyPurchased, other.buy(sale, "ann").Verdict, "also where the order was not made")
}

func TestSoldOutMemoryEndsWithinASecondOnEveryIngress(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(s *shop, sale uuid.UUID){
		"restock": func(s *shop, sale uuid.UUID) {
			_, err := s.Restock(s.t.Context(), sale, 1, "")
			require.NoError(s.t, err)
		},
		"release": func(s *shop, sale uuid.UUID) {
			held := s.buy(sale, "ann").Reservation
			_, err := s.Release(s.t.Context(), []reservation.Release{{SaleID: sale, OrderID: held.OrderID, UserID: "ann"}})
			require.NoError(s.t, err)
		},
		"resume": func(s *shop, sale uuid.UUID) {
			_, err := s.Pause(s.t.Context(), sale)
			require.NoError(s.t, err)
			_, err = s.Restock(s.t.Context(), sale, 1, "")
			require.NoError(s.t, err)
			_, err = s.Resume(s.t.Context(), sale)
			require.NoError(s.t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, sale := soldOutShop(t)
			// Another ingress, which hears of the change from Redis alone.
			ingress := newShopOn(t, s.rdb, s.keys, reservation.StoreOptions{})
			ingress.rememberSoldOut(sale)

			change(s, sale)
			changed := time.Now()
			for ingress.buy(sale, "bob").Verdict != reservation.Reserved {
				require.Less(t, time.Since(changed), time.Second, "the sale is still remembered as sold out")
			}
		})
	}
}

func TestSoldOutMemoryEndsWithoutRedis(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := newShopOn(t, ownClient(t, own.URL), testkit.Keys(t), reservation.StoreOptions{})
	sale := s.sale(1).ID
	s.buy(sale, "ann")
	s.rememberSoldOut(sale)
	own.Kill()
	testkit.Eventually(t, 5*time.Second, "the store admits that it does not know", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: "bob", Quantity: 1})
		return err != nil
	})
}

func TestEndedSaleIsNotAnsweredSoldOut(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	closesAt := time.Now().Add(1500 * time.Millisecond)
	sale, err := s.Create(t.Context(), reservation.Terms{Name: "short", Stock: 1, PerOrderLimit: 1, ClosesAt: closesAt})
	require.NoError(t, err)
	require.Equal(t, reservation.Reserved, s.buy(sale.ID, "ann").Verdict)
	require.Equal(t, reservation.SoldOut, s.buy(sale.ID, "bob").Verdict)
	testkit.Eventually(t, 5*time.Second, "the sale has ended", func() bool {
		return s.buy(sale.ID, "bob").Verdict == reservation.Ended
	})
	require.WithinRange(t, time.Now(), closesAt, closesAt.Add(time.Second))
	require.Equal(t, reservation.Ended, s.buy(sale.ID, "bob").Verdict, "and that stays so")
}
