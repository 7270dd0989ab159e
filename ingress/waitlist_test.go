package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation/order"
)

// A buyer waits, sees how many are before, is offered the unit that returns, and leaves.
func TestWaitingListOfSale(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	created := s.post("/v1/sales", `{"name":"Shoe","stock":1,"payment_window_seconds":3600,"waitlist":true}`, operator).
		is(http.StatusCreated)
	require.Equal(t, []any{true, 0.0}, []any{created["waitlist"], created["waiting"]})
	sale := uuid.MustParse(created["id"].(string))
	path := "/v1/sales/" + sale.String() + "/waitlist"
	s.post(path, "", as("ada")).isProblem(http.StatusConflict, "not-sold-out")
	s.get(path, as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	s.post(path+"/leave", "", as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	bought := s.buy(sale, "", as("holder"))
	bought.is(http.StatusAccepted)
	s.post(path, "", as("holder")).isProblem(http.StatusConflict, "already-purchased")
	s.post(path, `{"quantity":1}`, as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	s.post(path, "").isProblem(http.StatusUnauthorized, "unauthorized")

	join := func(user, key string) map[string]any {
		return s.post(path, "{}", as(user), withKey(key)).is(http.StatusAccepted)
	}
	first := join("ada", "k")
	require.Equal(t, 1.0, first["place"])
	again := s.post(path, "", as("ada"))
	require.Equal(t, first, again.is(http.StatusAccepted), "a repeat, also without the key")
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	entry := first["order_id"].(string)
	require.Equal(t, "waiting", s.get(path, as("ada")).is(http.StatusOK)["state"], "from Redis")
	s.get("/v1/orders/"+entry+"?receipt="+first["receipt"].(string), as("ada")).is(http.StatusOK)
	s.buy(uuid.MustParse(first["sale_id"].(string)), "", as("eve")).isProblem(http.StatusConflict, "offers-only")
	for place, user := range []string{"bob", "cid"} {
		require.Equal(t, float64(place+2), join(user, user)["place"])
	}

	s.startWorker()
	seen := func(user string) map[string]any { return s.get(path, as(user)).is(http.StatusOK) }
	testkit.Eventually(t, 20*time.Second, "all are counted", func() bool { return seen("cid")["before"] == 2.0 })
	testkit.Eventually(t, 20*time.Second, "the sale shows it", func() bool {
		return s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["waiting"] == 3.0
	})
	left := s.post(path+"/leave", "", as("bob")).is(http.StatusOK)
	require.Equal(t, []any{"left", 2.0}, []any{left["state"], left["place"]})
	require.Equal(t, left, s.post(path+"/leave", "", as("bob")).is(http.StatusOK))
	testkit.Eventually(t, 20*time.Second, "one less is before", func() bool { return seen("cid")["before"] == 1.0 })

	s.cancel(bought.header.Get("Location"), as("holder")).is(http.StatusOK)
	returned := time.Now()
	testkit.Eventually(t, 20*time.Second, "ada has the unit", func() bool { return seen("ada")["state"] == "offered" })
	t.Logf("the unit was offered within %v", time.Since(returned))
	offered := seen("ada")["order_id"].(string)
	s.buy(sale, "", as("eve")).isProblem(http.StatusConflict, "offers-only")
	testkit.Eventually(t, 20*time.Second, "it is an order", func() bool {
		return s.get("/v1/orders/"+offered, as("ada")).is(http.StatusOK)["status"] == string(order.StatusConfirmed)
	})
	require.Equal(t, "waiting", seen("cid")["state"])

	testkit.Eventually(t, 20*time.Second, "bob's place is free", func() bool {
		return s.post(path, "", as("bob"), withKey("bob")).status == http.StatusConflict
	})
	s.post(path, "", as("bob"), withKey("bob")).isProblem(http.StatusConflict, "order-ended")
	require.Equal(t, 4.0, join("bob", "again")["place"])
	require.Equal(t, "waiting", seen("bob")["state"])
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)
	require.Equal(t, "over", seen("cid")["state"])
	s.post(path, "", as("dan")).isProblem(http.StatusGone, "sale-ended")

	plain := s.openSizes().String()
	s.post("/v1/sales/"+plain+"/waitlist", "", as("ada")).isProblem(http.StatusNotFound, "waitlist-not-found")
	s.post("/v1/sales/"+uuid.NewString()+"/waitlist", "", as("ada")).isProblem(http.StatusNotFound, "sale-not-found")
}
