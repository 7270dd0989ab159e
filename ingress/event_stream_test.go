package ingress

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// streamEvent is an event of a stream.
type streamEvent struct {
	name, id string
	data     map[string]any
}

// eventReader is a client's end of a stream.
type eventReader struct {
	t      *testing.T
	status int
	header http.Header
	events chan streamEvent // closed when the stream ends
	stop   context.CancelFunc
	last   map[string]any // data of the last event of a sale
}

// watch opens a stream of events.
func (s *shop) watch(path string, headers ...reqHeader) *eventReader {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	require.NoError(s.t, err)
	for _, h := range headers {
		r.Header.Set(h.name, h.value)
	}
	answer, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(s.t, err)
	w := &eventReader{
		t:      s.t.(*testing.T),
		status: answer.StatusCode,
		header: answer.Header,
		events: make(chan streamEvent, 1000),
		stop:   stop,
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(w.events)
		_ = readEvents(answer.Body, w.events) // the end of a stream may be a cut connection
		_ = answer.Body.Close()
	})
	s.t.Cleanup(func() { stop(); reading.Wait() })
	return w
}

func readEvents(from io.Reader, into chan<- streamEvent) error {
	var e streamEvent
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch name {
		case "event":
			e.name = value
		case "id":
			e.id = value
		case "data":
			if err := json.Unmarshal([]byte(value), &e.data); err != nil {
				return err
			}
		case "":
			if e.name != "" { // false after a comment
				into <- e
			}
			e = streamEvent{}
		}
	}
	return lines.Err()
}

// next returns the next event; ok is false at the end of the stream.
func (w *eventReader) next() (e streamEvent, ok bool) {
	w.t.Helper()
	select {
	case e, ok = <-w.events:
		return e, ok
	case <-time.After(40 * time.Second):
		w.t.Fatal("the stream sends nothing")
		return streamEvent{}, false
	}
}

// receivesStatus checks that the next event has this status.
func (w *eventReader) receivesStatus(status order.Status, version int) map[string]any {
	w.t.Helper()
	e, ok := w.next()
	require.True(w.t, ok, "the stream has ended")
	require.Equal(
		w.t,
		[]any{string(status), strconv.Itoa(version), string(status), float64(version)},
		[]any{e.name, e.id, e.data["status"], e.data["version"]},
	)
	return e.data
}

func (w *eventReader) receivesEnd() {
	w.t.Helper()
	e, ok := w.next()
	require.False(w.t, ok, "%v", e)
}

func TestStreamsAreRefused(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t, func(c *Config) { c.MaxStreams = 1 })
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _ := s.order(sale, "ada")
	s.get(path+"/events").isProblem(http.StatusUnauthorized, "unauthorized")
	s.get(path+"/events", as("bob")).isProblem(http.StatusNotFound, "order-not-found")
	s.get("/v1/orders/x/events", as("ada")).isProblem(http.StatusNotFound, "order-not-found")
	s.get("/v1/sales/x/events").isProblem(http.StatusNotFound, "sale-not-found")
	s.get("/v1/sales/"+uuid.NewString()+"/events").isProblem(http.StatusNotFound, "sale-not-found")
	require.Equal(t, http.StatusMethodNotAllowed, s.ask(http.MethodHead, path+"/events", nil, as("ada")).status)

	orders, sales := s.watch(path+"/events", as("ada")), s.watch("/v1/sales/"+sale.String()+"/events")
	orders.receivesStatus(order.StatusReserved, 1)
	_, ok := sales.next()
	require.True(t, ok)
	r := s.get(path+"/events", as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "overloaded")
	require.NotEmpty(t, r.header.Get("Retry-After"))
	s.get("/v1/sales/"+sale.String()+"/events").isProblem(http.StatusServiceUnavailable, "overloaded")
	orders.stop()
	sales.stop()
	testkit.Eventually(t, 30*time.Second, "the slots are free", func() bool {
		return s.server.limits.orderStreams.all.taken.Load() == 0 && s.server.limits.saleStreams.all.taken.Load() == 0
	})
	s.watch(path+"/events", as("ada")).receivesStatus(order.StatusReserved, 1)
}

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

// The stream goes on when the sale does.
func TestSaleStreamIsSilentDuringRebuild(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, key := "/v1/sales/"+sale.String(), s.keys.Sale(s.keys.Partition(sale), sale)
	w := s.watch(path + "/events")
	e, ok := w.next()
	require.True(t, ok)
	require.Equal(t, 10.0, e.data["available"])
	require.NoError(t, s.rdb.Rename(t.Context(), key, key+"-kept").Err())
	s.awaitUnavailable(path)
	s.awaitUnavailable("/v1/sales")
	select {
	case e := <-w.events:
		t.Fatalf("an update of unknown stock: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	require.NoError(t, s.rdb.HSet(t.Context(), key+"-kept", "left", "8").Err())
	require.NoError(t, s.rdb.Rename(t.Context(), key+"-kept", key).Err())
	e, ok = w.next()
	require.True(t, ok)
	require.Equal(t, []any{8.0, 2.0}, []any{e.data["available"], e.data["held"]})
}

// All streams see reservation, payment, pause and restock, at the cost of one query.
func TestSaleStreamSendsEachChange(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	streams := []*eventReader{
		s.watch("/v1/sales/" + sale.String() + "/events"),
		s.watch("/v1/sales/" + sale.String() + "/events"),
	}
	// Changes in quick succession may arrive as one event, so the test waits for the last.
	expect := func(state string, stock, available, held, sold float64) {
		t.Helper()
		want := map[string]any{"state": state, "stock": stock, "available": available, "held": held, "sold": sold}
		for _, w := range streams {
			for e, ok := w.next(); ; e, ok = w.next() {
				require.True(t, ok)
				require.Equal(t, []string{"sale", ""}, []string{e.name, e.id})
				require.NotEqual(t, w.last, e.data, "only changes are sent")
				if w.last = e.data; e.data["held"] == held && e.data["sold"] == sold && e.data["state"] == state &&
					e.data["stock"] == stock {
					require.Equal(t, want, e.data)
					break
				}
			}
		}
	}
	expect("open", 10, 10, 0, 0)
	path, _, _ := s.purchased(sale, "ada")
	expect("open", 10, 9, 1, 0)
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	expect("open", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator).is(http.StatusOK)
	expect("paused", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator).is(http.StatusOK)
	expect("paused", 15, 14, 0, 1)
	streams = append(streams[:0:0], s.watch("/v1/sales/"+sale.String()+"/events"))
	expect("paused", 15, 14, 0, 1)
	select {
	case e := <-streams[0].events:
		t.Fatalf("nothing has changed: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	s.server.sales.feed.mu.Lock()
	require.Len(t, s.server.sales.feed.items, 1)
	s.server.sales.feed.mu.Unlock()
}

func TestFeedForgetsSaleWithoutSubscribers(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	for range 3 {
		w := s.watch("/v1/sales/" + sale.String() + "/events")
		_, ok := w.next()
		require.True(t, ok)
		w.stop()
		testkit.Eventually(t, 30*time.Second, "no subscriber is left", func() bool {
			s.server.sales.feed.mu.Lock()
			defer s.server.sales.feed.mu.Unlock()
			item, known := s.server.sales.feed.items[sale]
			return !known || len(item.subscribers) == 0
		})
	}
	testkit.Eventually(t, 20*time.Second, "the item is forgotten", func() bool {
		s.server.sales.feed.mu.Lock()
		defer s.server.sales.feed.mu.Unlock()
		return len(s.server.sales.feed.items) == 0
	})
}
