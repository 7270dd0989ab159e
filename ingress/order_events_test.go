package ingress

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// pricedTerms are those of a sale with a price and a pace.
var pricedTerms = reservation.Terms{
	Stock: 10, PaymentWindow: time.Hour, PaymentsPerSecond: 1, UnitPrice: 1290, Currency: "EUR",
}

// showsTerms checks that a confirmed order of a sale with pricedTerms says what to pay, and when.
func (s *shop) showsTerms(view map[string]any, amount float64) {
	s.t.Helper()
	require.Equal(s.t, []any{amount, "EUR"}, []any{view["amount"], view["currency"]})
	at := func(member string) time.Time {
		at, err := time.Parse(time.RFC3339, view[member].(string))
		require.NoError(s.t, err)
		return at
	}
	require.Equal(s.t, pricedTerms.PaymentWindow, at("expires_at").Sub(at("pay_from")))
}

func TestOrderStreamSendsEachChange(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(pricedTerms)
	path, _, receipt := s.purchased(sale, "ada")
	w := s.watch(withReceipt(path+"/events", receipt), as("ada"))
	require.Equal(t, http.StatusOK, w.status)
	require.Equal(t, []string{"text/event-stream", "no-store, no-transform", "no"}, []string{
		w.header.Get("Content-Type"), w.header.Get("Cache-Control"), w.header.Get("X-Accel-Buffering"),
	})
	other := s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusReserved, 1)
	other.receivesStatus(order.StatusReserved, 1)
	require.Contains(t, s.get("/metrics").body, `stampede_event_streams{of="order"} 2`+"\n")
	s.startWorker()
	s.showsTerms(w.receivesStatus(order.StatusConfirmed, 2), 1290)
	other.receivesStatus(order.StatusConfirmed, 2)
	paid := s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	require.Equal(t, paid, w.receivesStatus(order.StatusPaid, 3))
	other.receivesStatus(order.StatusPaid, 3)
	w.receivesEnd()
	other.receivesEnd()
	testkit.Eventually(t, 30*time.Second, "the slots are free", func() bool {
		return s.server.limits.orderStreams.all.taken.Load() == 0 && s.server.waiters.isEmpty()
	})
	require.Zero(t, s.server.inFlight.taken())
}

func TestOrderStreamEndsWithTheOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _, _ := s.purchased(sale, "ada")
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	w := s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusConfirmed, 2)
	s.post(path+"/cancel", "", as("ada")).is(http.StatusOK)
	w.receivesStatus(order.StatusCancelled, 3)
	w.receivesEnd()

	path, id, _ := s.purchased(s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour}), "ada")
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	w = s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusConfirmed, 2)
	s.overdue(id)
	w.receivesStatus(order.StatusExpired, 3)
	w.receivesEnd()

	// Without a payment window the confirmation is final.
	path, _, _ = s.purchased(s.sale(reservation.Terms{Stock: 10}), "ada")
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	w = s.watch(path+"/events", as("ada"))
	w.receivesStatus(order.StatusConfirmed, 2)
	w.receivesEnd()
}

func TestOrderStreamResumesAfterLastEventID(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	since := func(id string) reqHeader { return reqHeader{"Last-Event-ID", id} }
	for _, id := range []string{"1", "0", "-5", "3", "4", "99", "x"} {
		s.watch(path+"/events", as("ada"), since(id)).receivesStatus(order.StatusConfirmed, 2)
	}
	w := s.watch(path+"/events", as("ada"), since("2"))
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	w.receivesStatus(order.StatusPaid, 3)
	w.receivesEnd()
	// A browser that reconnects after the end gets the answer that ends it.
	w = s.watch(path+"/events", as("ada"), since("3"))
	require.Equal(t, http.StatusNoContent, w.status)
	w.receivesEnd()
}

// There is no event to send yet.
func TestOrderStreamSendsHeadImmediately(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	path, _ := s.confirm(s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour}), "ada")
	ctx, cancel := context.WithTimeout(t.Context(), heartbeatInterval*2/3)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path+"/events", nil)
	require.NoError(t, err)
	r.Header.Set("X-User-ID", "ada")
	r.Header.Set("Last-Event-ID", "2")
	answer, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, "text/event-stream", answer.Header.Get("Content-Type"))
}

// While Postgres does not answer, this server and Redis have lower versions than the client.
func TestOrderStreamSendsNoLowerVersion(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, onPostgres(t, postgres))
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id := s.confirm(sale, "ada")
	other, _ := s.confirm(sale, "bob")
	_, err := s.ledger.Pay(t.Context(), id, "ada", "pi_1") // at another server, which has shown it
	require.NoError(t, err)
	postgres.StopImmediate()
	paid := s.watch(path+"/events", as("ada"), reqHeader{"Last-Event-ID", "3"})
	confirmed := s.watch(other+"/events", as("bob"), reqHeader{"Last-Event-ID", "2"})
	require.Equal(t, http.StatusOK, paid.status)
	require.NoError(t, postgres.Restart(t.Context()))
	paid.receivesEnd()
	testkit.Eventually(t, 20*time.Second, "the order is paid", func() bool {
		return s.post(other+"/pay", `{"reference":"pi_2"}`, as("bob")).status == http.StatusOK
	})
	confirmed.receivesStatus(order.StatusPaid, 3)
	confirmed.receivesEnd()
	require.Equal(t, http.StatusNoContent, s.watch(path+"/events", as("ada"), reqHeader{"Last-Event-ID", "3"}).status)
}
