package reservation_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

func offersOf(sale uuid.UUID, item string, users ...string) (offers []reservation.Offer) {
	for _, user := range users {
		offers = append(offers, reservation.Offer{OrderID: order.NewOrderID(sale), UserID: user, Item: item})
	}
	return offers
}

func verdicts(
	t *testing.T, s *testshop.Shop, sale uuid.UUID, offers []reservation.Offer,
) (words []reservation.Verdict) {
	t.Helper()
	answers, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offers)
	require.NoError(t, err)
	require.Len(t, answers, len(offers))
	for i, a := range answers {
		words = append(words, a.Verdict)
		if a.Reservation.OrderID != uuid.Nil {
			require.Equal(t, offers[i].OrderID, a.Reservation.OrderID)
		}
	}
	return words
}

func TestOffersTakeUnitsInTheirOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 2).ID
	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Sale(0, sale), "state", "offers").Err())
	require.Equal(t, reservation.OffersOnly, s.Ask(t, sale, "eve").Verdict)

	offers := offersOf(sale, "", "ann", "bob", "cid", "dan")
	require.Equal(t, []reservation.Verdict{
		reservation.Reserved, reservation.Reserved, reservation.SoldOut, reservation.SoldOut,
	}, verdicts(t, s, sale, offers))
	require.Equal(t, []reservation.Verdict{
		reservation.Replayed, reservation.Replayed, reservation.SoldOut, reservation.SoldOut,
	}, verdicts(t, s, sale, offers))

	_, err := s.Release(t.Context(), []reservation.Release{{
		SaleID: sale, OrderID: offers[0].OrderID, UserID: "ann", Quantity: 1, Status: order.StatusExpired,
	}})
	require.NoError(t, err)
	require.Equal(t, []reservation.Verdict{
		reservation.OrderEnded, reservation.Replayed, reservation.Reserved, reservation.SoldOut,
	}, verdicts(t, s, sale, offers), "the first offer was made, and is over")
	require.Equal(t, []reservation.Verdict{reservation.Replayed, reservation.SoldOut}, verdicts(t, s, sale, offers[2:]))
	require.Len(t, s.Events(t, 0), 3)
}

func TestOffersOfItems(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenItems(t, 4, reservation.Item{Code: "m", Stock: 1}, reservation.Item{Code: "l", Stock: 2}).ID
	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Sale(0, sale), "state", "offers").Err())
	offers := append(offersOf(sale, "m", "ann", "bob"), offersOf(sale, "l", "cid", "dan")...)
	require.Equal(t, []reservation.Verdict{
		reservation.Reserved, reservation.SoldOut, reservation.Reserved, reservation.Reserved,
	}, verdicts(t, s, sale, offers), "items are sold out each by itself")
	for _, item := range []string{"", "xl"} {
		_, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offersOf(sale, item, "eve"))
		require.ErrorContains(t, err, fmt.Sprintf("no item %q", item))
	}
}

func TestOffersAreRefusedWhole(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 9)
	offer := func(offers []reservation.Offer) error {
		_, err := s.Offer(t.Context(), reservation.Sale{ID: sale}, offers)
		return err
	}
	require.Error(t, offer(nil))
	require.Error(t, offer(make([]reservation.Offer, order.MaxPerMessage+1)))
	_, err := s.Offer(t.Context(), reservation.Sale{ID: uuid.Must(uuid.NewV7())}, offersOf(sale, "", "ann"))
	require.ErrorIs(t, err, reservation.ErrSaleNotFound)

	key := s.Store.Keys.Sale(0, sale)
	require.NoError(t, offer(offersOf(sale, "", "ann")))
	require.NoError(t, s.Redis.HSet(t.Context(), key, "epoch", "2").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "bob")), reservation.ErrUnavailable, "the stock is another one")
	require.NoError(t, offer(offersOf(sale, "", "bob")), "the next call knows the new epoch")

	require.NoError(t, s.Redis.HSet(t.Context(), s.Store.Keys.Buyers(0, sale), "cid", "?").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "dan", "cid")), reservation.ErrReservationDamaged)
	require.NoError(t, s.Redis.HSet(t.Context(), key, "sequence", "1").Err())
	require.ErrorIs(t, offer(offersOf(sale, "", "eve")), reservation.ErrLostSale, "Redis was set back")
}
