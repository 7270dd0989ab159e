package reservation_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

// One ingress remembers the sale as sold out while another one sells a unit that has come back.
func TestBuyerWithOrderIsNotToldSoldOut(t *testing.T) {
	t.Parallel()
	for name, comesBack := range map[string]func(s *shop, sale reservation.Sale, held reservation.Reservation){
		"release": func(s *shop, sale reservation.Sale, held reservation.Reservation) {
			_, err := s.Release(s.t.Context(), []reservation.Release{{SaleID: sale.ID, OrderID: held.OrderID, UserID: "ann"}})
			require.NoError(s.t, err)
		},
		"restock": func(s *shop, sale reservation.Sale, _ reservation.Reservation) {
			_, err := s.Restock(s.t.Context(), sale.ID, 1, "")
			require.NoError(s.t, err)
		},
		"rebuild": func(s *shop, sale reservation.Sale, _ reservation.Reservation) { s.rebuild(sale, 2) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, sale := soldOutShop(t)
			counted, err := s.Show(t.Context(), sale)
			require.NoError(t, err)
			held := s.buy(sale, "ann").Reservation
			selling := s.next(s.rdb) // it remembers nothing
			bob := reservation.Request{Sale: sale, User: "bob", Quantity: 1, IdempotencyKey: "k"}
			s.rememberSoldOut(sale)
			comesBack(s, counted.Sale, held)
			testkit.Eventually(t, 10*time.Second, "the unit is sold", func() bool {
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

// An order that has ended is not forgotten where a sale is remembered as sold out.
func TestSoldOutMemoryKeepsKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	s := newShopOn(t, ownClient(t, testkit.OwnRedis(t).URL), testkit.Keys(t), reservation.StoreOptions{})
	sale := s.sale(1).ID
	request := reservation.Request{Sale: sale, User: "ann", Quantity: 1, IdempotencyKey: "k"}
	made, err := s.Reserve(t.Context(), request)
	require.NoError(t, err)
	order := made.Reservation.OrderID
	_, err = s.Release(t.Context(), []reservation.Release{{SaleID: sale, OrderID: order, UserID: "ann", Quantity: 1, Status: reservation.StatusExpired}})
	require.NoError(t, err)
	testkit.Eventually(t, 10*time.Second, "the unit is sold again", func() bool { return s.buy(sale, "bob").Verdict == reservation.Reserved })
	for _, ingress := range []*shop{s, s.next(s.rdb)} {
		ingress.rememberSoldOut(sale)
		again, err := ingress.Reserve(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, reservation.Answer{
			Verdict: reservation.OrderEnded, Status: reservation.StatusExpired,
			Reservation: reservation.Reservation{OrderID: order, Quantity: 1, Epoch: 1},
		}, again)
	}
}
