package fulfillment

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// Whatever became of Redis: a request that made an order which has ended never makes another one.
func TestARebuiltRedisKnowsTheRequestsOfOrdersThatHaveEnded(t *testing.T) {
	t.Parallel()
	s := newLostShop(t)
	sale := s.openPayable(t, 20)
	made := map[reservation.Status]uuid.UUID{}
	for _, status := range []reservation.Status{reservation.StatusRejected, reservation.StatusCancelled, reservation.StatusExpired} {
		made[status] = s.reserve(t, sale, string(status), 1, "k").Reservation.OrderID
		s.reserve(t, sale, string(status)+"-without-key", 1, "")
		if status == reservation.StatusRejected {
			s.refuseAll(t)
		} else {
			s.fulfil(t)
		}
	}
	cancel := func(id uuid.UUID, user string) {
		t.Helper()
		_, err := NewLedger(s.pool).Cancel(t.Context(), id, user)
		require.NoError(t, err)
	}
	cancel(made[reservation.StatusCancelled], "cancelled")
	endWindow(t, s.pool, made[reservation.StatusExpired])
	_, err := s.expire(t.Context())
	require.NoError(t, err)
	_, err = s.giveBack(t.Context())
	require.NoError(t, err)

	late := s.reserve(t, sale, "late", 1, "k").Reservation.OrderID
	s.fulfil(t)
	voided := s.reserve(t, sale, "voided", 1, "k").Reservation.OrderID // no worker has seen it
	for range 2 {
		require.NoError(t, s.rdb.Del(t.Context(), s.keys.Orders(0)).Err())
		s.flush(t)
		s.rebuild(t)
		for status, order := range made {
			again := s.reserve(t, sale, string(status), 1, "k")
			require.Equal(t, []any{reservation.OrderEnded, order, status}, []any{again.Verdict, again.Reservation.OrderID, again.Status})
		}
	}
	require.Equal(t, reservation.Replayed, s.reserve(t, sale, "late", 1, "k").Verdict)
	cancel(late, "late") // of a reservation of an earlier epoch
	_, err = s.giveBack(t.Context())
	require.NoError(t, err)
	require.Equal(t, reservation.OrderEnded, s.reserve(t, sale, "late", 1, "k").Verdict)
	// An order that went with Redis is no order that its buyer gave up.
	again := s.reserve(t, sale, "voided", 1, "k")
	require.Equal(t, reservation.Reserved, again.Verdict)
	require.NotEqual(t, voided, again.Reservation.OrderID)
	require.Equal(t, reservation.Reserved, s.reserve(t, sale, "cancelled", 1, "another").Verdict)
	require.EqualValues(t, -1, s.rdb.TTL(t.Context(), s.keys.Ended(0, sale)).Val(), "what a rebuild has gathered stays")
}

// refuseAll records what stands in the stream as refused, and gives its units back.
func (s *shop) refuseAll(t testing.TB) {
	t.Helper()
	b := s.batcher(t, nil)
	var events []reservation.OrderReserved
	for _, msg := range s.messages(t) {
		event, err := reservation.DecodeReserved(msg)
		require.NoError(t, err)
		events = append(events, event)
	}
	outcomes, err := NewLedger(s.pool).Refuse(t.Context(), events, reservation.RejectedSoldOut)
	require.NoError(t, err)
	require.True(t, b.release(t.Context(), outcomes))
}
