package ingress

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// A sale that has left Redis is answered as before, by Postgres: repeats get their orders, and everybody else hears
// that it has ended.
func TestRetiredSaleIsAnsweredAsBefore(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id, _ := s.purchased(sale, "ann", withKey("k"))
	other, _, _ := s.purchased(sale, "bob")
	cancelled, cancelledID, _ := s.purchased(sale, "cid", withKey("c"))
	s.startWorker(func(c *fulfillment.WorkerConfig) { c.RetireAfter = time.Millisecond })
	s.awaitStatus(cancelled, "cid", order.StatusConfirmed)
	s.cancel(cancelled, as("cid")).is(http.StatusOK)
	s.awaitReleased(sale, "cid")
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)

	purchases := map[string]func() reply{
		"a repeat":              func() reply { return s.buy(sale, "", as("ann"), withKey("k")) },
		"a repeat that waits":   func() reply { return s.buy(sale, "", as("ann"), withKey("k"), prefer("wait=5")) },
		"another key":           func() reply { return s.buy(sale, "", as("ann"), withKey("k2")) },
		"no key":                func() reply { return s.buy(sale, "", as("bob")) },
		"another quantity":      func() reply { return s.buy(sale, `{"quantity":2}`, as("ann"), withKey("k")) },
		"a repeat of one ended": func() reply { return s.buy(sale, "", as("cid"), withKey("c")) },
		"the ended one again":   func() reply { return s.buy(sale, "", as("cid"), withKey("c2")) },
		"a stranger":            func() reply { return s.buy(sale, "", as("eve")) },
		"a stranger with a key": func() reply { return s.buy(sale, "", as("eve"), withKey("k")) },
	}
	before := map[string]reply{}
	answers := func(when string) {
		t.Helper()
		for what, ask := range purchases {
			got := ask()
			require.Equal(t, before[what].status, got.status, "%s %s: %s", when, what, got.body)
			require.Equal(t, before[what].header.Get("Location"), got.header.Get("Location"), "%s %s", when, what)
			require.Equal(t, before[what].header.Get("Idempotency-Replayed"), got.header.Get("Idempotency-Replayed"), what)
			require.Equal(t, withoutRequestID(before[what].body), withoutRequestID(got.body), "%s %s", when, what)
		}
	}
	for _, paid := range []string{path, other} {
		s.awaitStatus(paid, map[string]string{path: "ann", other: "bob"}[paid], order.StatusConfirmed)
	}
	require.Zero(t, countRows(s, "SELECT count(*) FROM sales WHERE retired_at IS NOT NULL"), "orders await payment")
	s.pay(path, "pi", as("ann")).is(http.StatusOK)
	for what, ask := range purchases {
		before[what] = ask()
	}
	before["a repeat"].is(http.StatusAccepted)
	before["a stranger"].isProblem(http.StatusGone, "sale-ended")
	before["a repeat of one ended"].isEnded(cancelledID, order.StatusCancelled)
	answers("while Redis has the buyers,")
	s.pay(other, "pi", as("bob")).is(http.StatusOK)
	testkit.Eventually(t, 20*time.Second, "the sale has left Redis", func() bool {
		return s.rdb.Exists(t.Context(), s.keys.Buyers(s.keys.Partition(sale), sale)).Val() == 0
	})
	answers("when it is retired,")
	s.awaitUnits(sale, 8, 0, 2)
	require.Equal(t, "ended", s.get("/v1/sales/" + sale.String()).is(http.StatusOK)["state"])
	require.Equal(t, id.String(), s.get(path, as("ann")).is(http.StatusOK)["order_id"])
	s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator).
		isProblem(http.StatusConflict, "illegal-transition")
	s.post("/v1/sales/"+sale.String()+"/end", "", operator).is(http.StatusOK)

	p := s.keys.Partition(sale)
	require.NoError(t, s.rdb.Del(t.Context(), s.keys.Sale(p, sale)).Err())
	require.NoError(t, s.rdb.SRem(t.Context(), s.keys.Sales(p), sale.String()).Err())
	answers("when its keys are deleted,")
	fresh := openShopOn(t, s.on) // it has never seen the sale
	fresh.buy(sale, "", as("eve")).isProblem(http.StatusGone, "sale-ended")
	require.Equal(t, before["a repeat"].status, fresh.buy(sale, "", as("ann"), withKey("k")).status)
	s.buy(uuid.Must(uuid.NewV7()), "", as("ann")).isProblem(http.StatusNotFound, "sale-not-found")

	unlock := s.lock("orders")
	s.buy(sale, "", as("eve")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	unlock()
	testkit.Eventually(t, 20*time.Second, "it answers again", func() bool {
		return s.buy(sale, "", as("eve")).status == http.StatusGone
	})
}

func countRows(s *shop, query string) (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), query).Scan(&n))
	return n
}

// withoutRequestID returns the body of a problem without the member that differs in each answer.
func withoutRequestID(body string) string {
	text, _, _ := strings.Cut(body, `,"request_id":`)
	return text
}
