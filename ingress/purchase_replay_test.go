package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// isEnded checks that a purchase was answered with its ended order.
func (r reply) isEnded(id uuid.UUID, status order.Status) {
	r.t.Helper()
	p := r.isProblem(http.StatusConflict, "order-ended")
	require.Equal(r.t, "/v1/orders/"+id.String(), r.header.Get("Location"))
	require.Empty(r.t, r.header.Get("Idempotency-Replayed"), "before and after the units are released")
	require.Equal(r.t, []any{id.String(), string(status)}, []any{p["order_id"], p["order_status"]})
}

// awaitReleased waits until Redis has released the units of the user's order.
func (s *shop) awaitReleased(sale uuid.UUID, user string) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, "the units of "+user+" are back", func() bool {
		held, err := s.rdb.HExists(s.t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale), user).Result()
		require.NoError(s.t, err)
		return !held
	})
}

func TestReplayNeverPurchasesAgainAfterOrderEnded(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	other := openShopOn(t, s.on)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	orders := map[order.Status]uuid.UUID{}
	everyReplayIsEnded := func() {
		t.Helper()
		for status, id := range orders {
			user := string(status)
			for _, ingress := range []*shop{s, other} {
				ingress.buy(sale, "", as(user), withKey("k")).isEnded(id, status)
				ingress.buy(sale, "", as(user), withKey("k"), prefer("wait=20")).isEnded(id, status)
			}
		}
	}
	paths := map[order.Status]string{}
	for status, refused := range map[order.Status]string{
		order.StatusCancelled: "", order.StatusExpired: "",
		order.StatusRejected: order.RejectedSoldOut,
	} {
		user := string(status)
		paths[status], orders[status], _ = s.purchased(sale, user, withKey("k"))
		s.recordReserved(sale, user, refused)
	}
	s.cancel(paths[order.StatusCancelled], as("cancelled")).is(http.StatusOK)
	expired := orders[order.StatusExpired]
	delete(orders, order.StatusExpired) // a worker has to expire it
	everyReplayIsEnded()                // the units are not released yet

	s.overdue(expired)
	s.startWorker()
	s.awaitStatus(paths[order.StatusExpired], "expired", order.StatusExpired)
	orders[order.StatusExpired] = expired
	everyReplayIsEnded()
	for status := range orders {
		s.awaitReleased(sale, string(status))
	}
	everyReplayIsEnded()
	s.buy(sale, `{"quantity":2}`, as("cancelled"), withKey("k")).
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")

	// A purchase with a new key, or without one, succeeds. The old key still returns its own order.
	s.buy(sale, "", as("cancelled"), withKey("another")).is(http.StatusAccepted)
	s.buy(sale, "", as("expired")).is(http.StatusAccepted)
	s.buy(sale, "", as("another"), withKey("k")).is(http.StatusAccepted)
	everyReplayIsEnded()
	_, err := s.catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	everyReplayIsEnded()
}

// Only Postgres knows that an order has ended until Redis releases its units.
func TestReplayMayBeBehindWhilePostgresIsSlow(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id, _ := s.purchased(sale, "ada", withKey("k"))
	again := s.buy(sale, "", as("ada"), withKey("k"))
	require.NotContains(t, again.is(http.StatusAccepted), "may_be_behind", "Postgres does not have it yet")
	s.recordReserved(sale, "ada", "")

	unlock := s.lock("orders")
	behind := s.buy(sale, "", as("ada"), withKey("k"))
	require.Equal(t, true, behind.is(http.StatusAccepted)["may_be_behind"])
	require.Equal(t, "true", behind.header.Get("Idempotency-Replayed"))
	unlock()
	testkit.Eventually(t, 20*time.Second, "Postgres is queried again", func() bool {
		return s.cancel(path, as("ada")).status == http.StatusOK
	})
	testkit.Eventually(t, 20*time.Second, "the end is known", func() bool {
		return s.buy(sale, "", as("ada"), withKey("k")).status == http.StatusConflict
	})
	s.buy(sale, "", as("ada"), withKey("k")).isEnded(id, order.StatusCancelled)
}
