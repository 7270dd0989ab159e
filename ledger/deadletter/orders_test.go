package deadletter_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
	"stampede/stream"
)

func TestRefusedOrdersBecomeDeadLettersOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	events := testshop.ReservedCrowd(s.Open(t, 5), 3)
	key := s.Keys.Orders(0)
	id, err := s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: stream.Values(events...)}).Result()
	require.NoError(t, err)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, id)
	require.NoError(t, err)
	entry.Deliveries = 4

	refused := stream.OrderErrors{
		{OrderID: events[0].OrderID, Err: errors.New("one")},
		{OrderID: events[2].OrderID, Err: errors.New("two")},
	}
	for range 2 { // a repeat changes nothing
		require.NoError(t, letters.Park(t.Context(), entry, fmt.Errorf("refused: %w", refused)))
	}
	parked, err := letters.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, parked, 2)
	for i, of := range []int{2, 0} { // newest first
		require.Equal(t, events[of].OrderID, parked[i].OrderID)
		require.Equal(t, id, parked[i].Entry.ID)
		require.Contains(t, parked[i].Reason, refused[1-i].Err.Error())
		require.NotContains(t, parked[i].Reason, refused[i].Err.Error())
		held, err := deadletter.OrdersOf(parked[i].Entry)
		require.NoError(t, err)
		require.Equal(t, []order.OrderReserved{events[of]}, held)
	}
	require.NoError(t, letters.Park(t.Context(), entry, errors.New("unreadable")))
	whole, err := letters.List(t.Context(), deadletter.StatusParked, 10)
	require.NoError(t, err)
	require.Len(t, whole, 3)
	require.Equal(t, uuid.Nil, whole[0].OrderID, "the whole entry has a row of its own")

	again, appended, err := letters.Replay(t.Context(), parked[0].ID, "ann")
	require.NoError(t, err)
	require.True(t, appended)
	replayed, err := stream.ReadEntry(t.Context(), s.Rdb, key, again)
	require.NoError(t, err)
	held, err := deadletter.OrdersOf(replayed)
	require.NoError(t, err)
	require.Equal(t, []order.OrderReserved{events[2]}, held, "only the order of the letter is appended")
	// Refused again, it goes back to its letter, also if the worker cannot read the entry.
	for _, reason := range []error{refused[1:], errors.New("unreadable")} {
		require.NoError(t, letters.Park(t.Context(), replayed, reason))
		letter, err := letters.Get(t.Context(), parked[0].ID)
		require.NoError(t, err)
		require.Equal(t, deadletter.StatusParked, letter.Status)
		require.Equal(t, again, letter.Entry.ID)
	}
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 3)
}

func TestDiscardOfWholeEntryRejectsItsReadableOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	letters := deadletter.NewStore(s.Pool, s.Rdb, s.Store)
	sale := s.Open(t, 5)
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, sale, user)
	}
	events := s.Events(t, 0)
	values := stream.Values(events...)
	values[stream.FieldPayload] = replacing("cid\n", "{cid}\n")(values[stream.FieldPayload].(string))
	entry := stream.Entry{Stream: s.Keys.Orders(0), ID: "1-1", Fields: stream.FieldsOf(values)}
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	require.NoError(t, letters.Park(t.Context(), entry, order.ErrUndecodable))
	id := testwork.OnlyLetter(t, s, letters).ID
	require.NoError(t, letters.Discard(t.Context(), id, "damaged", "ann"))
	resolution := testwork.OnlyLetter(t, s, letters).Resolution
	for _, event := range events[:2] {
		o, err := ledger.New(s.Pool).Order(t.Context(), event.OrderID)
		require.NoError(t, err)
		require.Equal(t, order.StatusRejected, o.Status)
		require.Contains(t, resolution, "order "+event.OrderID.String()+" is rejected and its units are back in the sale")
	}
	require.Contains(t, resolution, "if it was accepted, `stampede reconcile` records it from its reservation")
	testwork.RequireMended(t, s, sale, "")
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, events[2].OrderID).Status)
}
