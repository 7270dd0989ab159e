package reservation_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// An event is appended only for a reservation that the user holds.
func TestAppendAddsOnlyCurrentReservations(t *testing.T) {
	t.Parallel()
	rdb, keys := testkit.Redis(t), testkit.Keys(t)
	store := reservation.NewStore(rdb, keys, reservation.StoreOptions{Logger: testkit.Logger(t)})
	t.Cleanup(store.Close)
	sale := uuid.New()
	held := order.OrderReserved{OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "ann", Quantity: 1, Epoch: 1}
	require.NoError(
		t, rdb.HSet(t.Context(), keys.Buyers(0, sale), "ann", order.CompactID(held.OrderID)+" 1 7 1a0c2d3e4f5@1").Err(),
	)
	former := held
	former.OrderID = order.NewOrderID(sale)
	notHeld := held
	notHeld.UserID = "bob"
	added, err := store.AppendReserved(t.Context(), 0, sale, []order.OrderReserved{former, held, notHeld})
	require.NoError(t, err)
	require.Equal(t, []bool{false, true, false}, added)
	entries, err := rdb.XRange(t.Context(), keys.Orders(0), "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, "ann\n"+order.CompactID(held.OrderID)+" 1 7 1a0c2d3e4f5@1", entries[0].Values["payload"])
	require.Equal(t, order.CompactID(held.OrderID), entries[0].Values["_watermill_message_uuid"])
}
