package fulfillment_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// Whatever became of Redis: a request that made an order which has ended never makes another one.
func TestRebuildRestoresKeysOfEndedOrders(t *testing.T) {
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
		_, err := fulfillment.NewLedger(s.pool).Cancel(t.Context(), id, user)
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
	require.EqualValues(t, -1, s.rdb.TTL(t.Context(), s.keys.Ended(0, sale)).Val(), "what a rebuild has staged stays")
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
	outcomes, err := fulfillment.NewLedger(s.pool).Refuse(t.Context(), events, reservation.RejectedSoldOut)
	require.NoError(t, err)
	require.True(t, b.Release(t.Context(), outcomes))
}

// Without what Redis knows of ended orders used keys would buy again: the audit names each, and a rebuild mends them.
func TestAuditReportsLostKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(t *testing.T, s *shop, sale uuid.UUID)
		found  int64
		what   string
	}{
		"the hash": {func(t *testing.T, s *shop, sale uuid.UUID) {
			require.NoError(t, s.rdb.Del(t.Context(), s.keys.Ended(0, sale)).Err())
		}, 2, "Redis does not know its idempotency key, which would buy again"},
		"the hash and its mark": {func(t *testing.T, s *shop, sale uuid.UUID) {
			require.NoError(t, s.rdb.Del(t.Context(), s.keys.Ended(0, sale)).Err())
			require.NoError(t, s.rdb.HDel(t.Context(), s.keys.Sale(0, sale), "ended").Err())
		}, 2, "Redis does not know its idempotency key, which would buy again"},
		"the mark": {func(t *testing.T, s *shop, sale uuid.UUID) {
			require.NoError(t, s.rdb.HDel(t.Context(), s.keys.Sale(0, sale), "ended").Err())
		}, 1, "Redis has ended orders of the sale, and the sale does not say so"},
		"one field": {func(t *testing.T, s *shop, sale uuid.UUID) {
			names := s.rdb.HKeys(t.Context(), s.keys.Ended(0, sale)).Val()
			require.NoError(t, s.rdb.HDel(t.Context(), s.keys.Ended(0, sale), names[0]).Err())
		}, 1, "Redis does not know its idempotency key, which would buy again"},
		"one value": {func(t *testing.T, s *shop, sale uuid.UUID) {
			names := s.rdb.HKeys(t.Context(), s.keys.Ended(0, sale)).Val()
			require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Ended(0, sale), names[0], "?", "\xff", "?").Err())
		}, 1, "Redis has something else for its idempotency key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, testkit.Pool(t))
			sale := s.openPayable(t, 20)
			s.reserve(t, sale, "rejected", 1, "k")
			s.refuseAll(t)
			require.NoError(t, s.rdb.Del(t.Context(), s.keys.Orders(0)).Err())
			order := s.reserve(t, sale, "cancelled", 1, "k").Reservation.OrderID
			s.reserve(t, sale, "keyless", 1, "")
			s.fulfil(t)
			_, err := fulfillment.NewLedger(s.pool).Cancel(t.Context(), order, "cancelled")
			require.NoError(t, err)
			require.NotContains(t, textOf(t, s.audit(t, sale)), "idempotency key", "its release is pending")
			_, err = s.giveBack(t.Context())
			require.NoError(t, err)
			report := s.audit(t, sale)
			require.False(t, report.Broken(), textOf(t, report))

			c.damage(t, s, sale)
			report = s.audit(t, sale)
			require.Equal(t, c.found, report.Promise("S7").Found, textOf(t, report))
			require.Contains(t, textOf(t, report), c.what)
			require.Equal(t, fulfillment.RemedyRebuild, report.Promise("S7").Findings[0].Remedy)
			s.requireMended(t, sale, "")
			require.Equal(t, reservation.OrderEnded, s.reserve(t, sale, "cancelled", 1, "k").Verdict)
			require.Equal(t, reservation.OrderEnded, s.reserve(t, sale, "rejected", 1, "k").Verdict)
		})
	}
}
