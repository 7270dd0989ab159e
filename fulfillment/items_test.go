package fulfillment_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// Baskets with an item that Postgres lacks become dead letters, each alone. A replay records the basket when the item
// is there, and a discard returns its units to each item.
func TestBasketsAreReplayedAndDiscarded(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	created, err := s.Create(t.Context(), reservation.Terms{
		Name: "shirt", PerOrderLimit: 4, Stock: 10,
		Items: []reservation.Item{{Code: "m", Name: "M", Stock: 6}, {Code: "l", Name: "L", Stock: 4}},
	})
	require.NoError(t, err)
	sale := created.Sale
	var events []order.OrderReserved
	for user, items := range map[string]map[string]int64{
		"ann": {"m": 2, "l": 1}, "bob": {"m": 1}, "cid": {"m": 1, "l": 2},
	} {
		answer, err := s.Reserve(t.Context(),
			reservation.Request{Sale: sale.ID, User: user, Items: items, IdempotencyKey: "key-" + user})
		require.NoError(t, err)
		require.Equal(t, reservation.Reserved, answer.Verdict)
		made, err := deadletter.OrdersOf(testwork.TakeOut(t, s))
		require.NoError(t, err)
		events = append(events, made...)
	}
	entry := &redis.XAddArgs{Stream: s.Keys.Orders(0), Values: stream.Values(events...)}
	require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'Z' WHERE code = 'l'"))
	require.NoError(t, s.Rdb.XAdd(t.Context(), entry).Err())
	config := testwork.Config(t, s)
	config.MaxDeliveries = 2
	testwork.Work(t, config)
	testwork.AwaitRest(t, s)

	store := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	letters, err := store.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, letters, 2)
	ids, orders := map[string]int64{}, map[string]uuid.UUID{}
	for _, letter := range letters {
		held, err := deadletter.OrdersOf(letter.Entry)
		require.NoError(t, err)
		require.Len(t, held, 1)
		require.Contains(t, events, held[0])
		require.Equal(t, letter.OrderID, held[0].OrderID)
		require.Contains(t, letter.Reason, "the lines are not of the items of the sale: "+string(held[0].Lines))
		ids[held[0].UserID], orders[held[0].UserID] = letter.ID, letter.OrderID
	}
	require.Equal(t, []string{"bob a1"}, testshop.Rows(t, s.Pool, "SELECT user_id || ' ' || lines FROM orders"))

	require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'b' WHERE code = 'l'"))
	_, appended, err := store.Replay(t.Context(), ids["ann"], "zoe")
	require.NoError(t, err)
	require.True(t, appended)
	require.NoError(t, store.Discard(t.Context(), ids["cid"], "a mistake", "zoe"))
	testwork.AwaitRest(t, s)
	for range 2 {
		for user, want := range map[string]order.Order{
			"ann": {Status: order.StatusConfirmed, Lines: "a2b1", Items: `{"m":2,"l":1}`},
			"cid": {Status: order.StatusRejected, Lines: "a1b2", Items: `{"m":1,"l":2}`, Reason: deadletter.RejectedDiscarded},
		} {
			o := testwork.Order(t, s.Pool, orders[user])
			require.Equal(t, want, order.Order{Status: o.Status, Lines: o.Lines, Items: o.Items, Reason: o.Reason})
		}
		require.Equal(t, "3,1 4", testwork.SoldItems(t, s.Pool, sale.ID))
		require.Equal(t, map[string]int64{"": 6, "a": 3, "b": 3}, s.LeftItems(t, sale))
		testwork.RequireUnbroken(t, s, sale.ID)
		// Another delivery of all three changes nothing, also without the item.
		require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'Z' WHERE code = 'l'"))
		require.NoError(t, s.Rdb.XAdd(t.Context(), entry).Err())
		testwork.AwaitRest(t, s)
		require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters WHERE status = 'parked'"))
		require.NoError(t, s.Exec(t, "UPDATE sale_items SET item = 'b' WHERE code = 'l'"))
	}
}
