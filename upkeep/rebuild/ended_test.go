package rebuild_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
)

// A retry of a request whose order has ended never makes another order.
func TestRebuildRestoresKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.OpenPayable(t, 20)
	made := map[order.Status]uuid.UUID{}
	for _, status := range []order.Status{order.StatusRejected, order.StatusCancelled, order.StatusExpired} {
		made[status] = s.Attempt(t, sale, string(status), 1, "k").Reservation.OrderID
		s.Attempt(t, sale, string(status)+"-without-key", 1, "")
		if status == order.StatusRejected {
			refuseAll(t, s)
		} else {
			testwork.Fulfil(t, s)
		}
	}
	cancel := func(id uuid.UUID, user string) {
		t.Helper()
		testwork.Cancel(t, ledger.New(s.Pool), id, user)
	}
	cancel(made[order.StatusCancelled], "cancelled")
	testwork.EndWindow(t, s.Pool, made[order.StatusExpired])
	testwork.Expire(t, s)
	testwork.ReleaseUnits(t, s)

	late := s.Attempt(t, sale, "late", 1, "k").Reservation.OrderID
	testwork.Fulfil(t, s)
	voided := s.Attempt(t, sale, "voided", 1, "k").Reservation.OrderID // unread by workers
	for range 2 {
		require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
		s.Flush(t)
		testwork.Rebuild(t, s)
		for status, id := range made {
			again := s.Attempt(t, sale, string(status), 1, "k")
			require.Equal(t, []any{reservation.OrderEnded, id, status},
				[]any{again.Verdict, again.Reservation.OrderID, again.Status})
		}
	}
	require.Equal(t, reservation.Replayed, s.Attempt(t, sale, "late", 1, "k").Verdict)
	cancel(late, "late") // of a reservation of an earlier epoch
	testwork.ReleaseUnits(t, s)
	require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "late", 1, "k").Verdict)
	// The key of a voided order may buy again.
	again := s.Attempt(t, sale, "voided", 1, "k")
	require.Equal(t, reservation.Reserved, again.Verdict)
	require.NotEqual(t, voided, again.Reservation.OrderID)
	require.Equal(t, reservation.Reserved, s.Attempt(t, sale, "cancelled", 1, "another").Verdict)
	require.EqualValues(t, -1, s.Rdb.TTL(t.Context(), s.Keys.Ended(0, sale)).Val(), "the staged key no longer expires")
}

// refuseAll rejects the orders in the stream and releases their units.
func refuseAll(t testing.TB, s *testshop.Shop) {
	t.Helper()
	b := testwork.Batcher(t, s, nil)
	outcomes, err := ledger.New(s.Pool).Refuse(t.Context(), s.Events(t, 0), order.RejectedSoldOut)
	require.NoError(t, err)
	require.True(t, b.Release(t.Context(), outcomes))
}

// Without its record of ended orders Redis would accept used idempotency keys.
func TestAuditReportsLostKeysOfEndedOrders(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(t *testing.T, s *testshop.Shop, sale uuid.UUID)
		found  int64
		what   string
	}{
		"hash deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Ended(0, sale)).Err())
		}, 2, "its idempotency key is missing in Redis: a retry would buy again"},
		"hash and mark deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Ended(0, sale)).Err())
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, sale), "ended").Err())
		}, 2, "its idempotency key is missing in Redis: a retry would buy again"},
		"mark deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, sale), "ended").Err())
		}, 1, "Redis has ended orders of the sale, and does not use them"},
		"field deleted": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			names := s.Rdb.HKeys(t.Context(), s.Keys.Ended(0, sale)).Val()
			require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Ended(0, sale), names[0]).Err())
		}, 1, "its idempotency key is missing in Redis: a retry would buy again"},
		"value damaged": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			names := s.Rdb.HKeys(t.Context(), s.Keys.Ended(0, sale)).Val()
			require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Ended(0, sale), names[0], "?", "\xff", "?").Err())
		}, 1, "Redis has another record of its idempotency key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.OpenPayable(t, 20)
			s.Attempt(t, sale, "rejected", 1, "k")
			refuseAll(t, s)
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
			cancelled := s.Attempt(t, sale, "cancelled", 1, "k").Reservation.OrderID
			s.Ask(t, sale, "keyless")
			testwork.Fulfil(t, s)
			testwork.Cancel(t, ledger.New(s.Pool), cancelled, "cancelled")
			require.NotContains(t, testwork.Text(t, testwork.Audit(t, s, sale)), "idempotency key", "its release is pending")
			testwork.ReleaseUnits(t, s)
			report := testwork.RequireUnbroken(t, s, sale)

			c.damage(t, s, sale)
			report = testwork.Audit(t, s, sale)
			require.Equal(t, c.found, report.Promise("S7").Found, testwork.Text(t, report))
			require.Contains(t, testwork.Text(t, report), c.what)
			require.Equal(t, audit.RemedyRebuild, report.Promise("S7").Findings[0].Remedy)
			testwork.RequireMended(t, s, sale, "")
			require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "cancelled", 1, "k").Verdict)
			require.Equal(t, reservation.OrderEnded, s.Attempt(t, sale, "rejected", 1, "k").Verdict)
		})
	}
}
