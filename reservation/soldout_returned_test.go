package reservation_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

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
