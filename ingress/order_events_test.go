package ingress

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
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
	w := &eventReader{t: s.t.(*testing.T), status: answer.StatusCode, header: answer.Header, events: make(chan streamEvent, 1000), stop: stop}
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(w.events)
		readEvents(answer.Body, w.events)
		_ = answer.Body.Close()
	})
	s.t.Cleanup(func() { stop(); reading.Wait() })
	return w
}

func readEvents(from io.Reader, into chan<- streamEvent) {
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
			if json.Unmarshal([]byte(value), &e.data) != nil {
				return
			}
		case "":
			if e.name != "" { // false after a comment
				into <- e
			}
			e = streamEvent{}
		}
	}
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
func (w *eventReader) receivesStatus(status reservation.Status, version int) map[string]any {
	w.t.Helper()
	e, ok := w.next()
	require.True(w.t, ok, "the stream has ended")
	require.Equal(w.t, []any{string(status), strconv.Itoa(version), string(status), float64(version)}, []any{e.name, e.id, e.data["status"], e.data["version"]})
	return e.data
}

func (w *eventReader) receivesEnd() {
	w.t.Helper()
	e, ok := w.next()
	require.False(w.t, ok, "%v", e)
}

func TestOrderStreamSendsEachChange(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _, receipt := s.purchased(sale, "ada")
	w := s.watch(withReceipt(path+"/events", receipt), as("ada"))
	require.Equal(t, http.StatusOK, w.status)
	require.Equal(t, []string{"text/event-stream", "no-store", "no"}, []string{
		w.header.Get("Content-Type"), w.header.Get("Cache-Control"), w.header.Get("X-Accel-Buffering"),
	})
	other := s.watch(path+"/events", as("ada"))
	w.receivesStatus(reservation.StatusReserved, 1)
	other.receivesStatus(reservation.StatusReserved, 1)
	require.Contains(t, s.get("/metrics").body, `stampede_event_streams{of="order"} 2`+"\n")
	s.startWorker()
	require.NotEmpty(t, w.receivesStatus(reservation.StatusConfirmed, 2)["expires_at"])
	other.receivesStatus(reservation.StatusConfirmed, 2)
	paid := s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	require.Equal(t, paid, w.receivesStatus(reservation.StatusPaid, 3))
	other.receivesStatus(reservation.StatusPaid, 3)
	w.receivesEnd()
	other.receivesEnd()
	testkit.Eventually(t, 10*time.Second, "the slots are free", func() bool {
		return s.server.orderStreamSlots.taken.Load() == 0 && s.server.waiters.isEmpty()
	})
	require.Zero(t, s.server.inFlight.taken())
}

func TestOrderStreamEndsWithTheOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _, _ := s.purchased(sale, "ada")
	s.awaitStatus(path, "ada", reservation.StatusConfirmed)
	w := s.watch(path+"/events", as("ada"))
	w.receivesStatus(reservation.StatusConfirmed, 2)
	s.post(path+"/cancel", "", as("ada")).is(http.StatusOK)
	w.receivesStatus(reservation.StatusCancelled, 3)
	w.receivesEnd()

	soon := s.sale(reservation.Terms{Stock: 10, PaymentWindow: 2 * time.Second})
	path, _, _ = s.purchased(soon, "ada")
	s.awaitStatus(path, "ada", reservation.StatusConfirmed)
	w = s.watch(path+"/events", as("ada"))
	w.receivesStatus(reservation.StatusConfirmed, 2)
	w.receivesStatus(reservation.StatusExpired, 3)
	w.receivesEnd()

	// Without a payment window the confirmation is final.
	path, _, _ = s.purchased(s.sale(reservation.Terms{Stock: 10}), "ada")
	s.awaitStatus(path, "ada", reservation.StatusConfirmed)
	w = s.watch(path+"/events", as("ada"))
	w.receivesStatus(reservation.StatusConfirmed, 2)
	w.receivesEnd()
}

func TestOrderStreamResumesAfterLastEventID(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	since := func(id string) reqHeader { return reqHeader{"Last-Event-ID", id} }
	for _, id := range []string{"1", "0", "-5", "99", "x"} {
		s.watch(path+"/events", as("ada"), since(id)).receivesStatus(reservation.StatusConfirmed, 2)
	}
	w := s.watch(path+"/events", as("ada"), since("2"))
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	w.receivesStatus(reservation.StatusPaid, 3)
	w.receivesEnd()
	// A browser that reconnects after the end is told to stop.
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
	s := openShopOn(t, servers{testkit.RedisURL(t), postgres.URL, testkit.Keys(t)})
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
	confirmed.receivesStatus(reservation.StatusPaid, 3)
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
		t.Fatalf("nobody knows this: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	require.NoError(t, s.rdb.HSet(t.Context(), key+"-kept", "left", "8").Err())
	require.NoError(t, s.rdb.Rename(t.Context(), key+"-kept", key).Err())
	e, ok = w.next()
	require.True(t, ok)
	require.Equal(t, []any{8.0, 2.0}, []any{e.data["available"], e.data["held"]})
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
	orders.receivesStatus(reservation.StatusReserved, 1)
	_, ok := sales.next()
	require.True(t, ok)
	r := s.get(path+"/events", as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "overloaded")
	require.NotEmpty(t, r.header.Get("Retry-After"))
	s.get("/v1/sales/"+sale.String()+"/events").isProblem(http.StatusServiceUnavailable, "overloaded")
	orders.stop()
	sales.stop()
	testkit.Eventually(t, 10*time.Second, "the slots are free", func() bool {
		return s.server.orderStreamSlots.taken.Load() == 0 && s.server.saleStreamSlots.taken.Load() == 0
	})
	s.watch(path+"/events", as("ada")).receivesStatus(reservation.StatusReserved, 1)
}

func TestStreamsSurvivePostgresRestart(t *testing.T) {
	t.Parallel()
	postgres := testkit.OwnPostgres(t)
	s := openShopOn(t, servers{testkit.RedisURL(t), postgres.URL, testkit.Keys(t)})
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	reserved, _, _ := s.purchased(sale, "bob")
	w, waiting, sales := s.watch(path+"/events", as("ada")), s.watch(reserved+"/events", as("bob")), s.watch("/v1/sales/"+sale.String()+"/events")
	w.receivesStatus(reservation.StatusConfirmed, 2)
	waiting.receivesStatus(reservation.StatusReserved, 1)
	_, ok := sales.next()
	require.True(t, ok)
	postgres.StopImmediate()
	s.awaitUnavailable("/v1/sales/" + sale.String())
	s.watch(reserved+"/events", as("bob")).receivesStatus(reservation.StatusReserved, 1)
	require.NoError(t, postgres.Restart(t.Context()))
	testkit.Eventually(t, 20*time.Second, "the order is paid", func() bool {
		return s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).status == http.StatusOK
	})
	w.receivesStatus(reservation.StatusPaid, 3)
	w.receivesEnd()
	s.recordReserved(sale, "bob", "")
	waiting.receivesStatus(reservation.StatusConfirmed, 2)
	e, ok := sales.next()
	require.True(t, ok)
	require.Equal(t, "sale", e.name)
}

// One client does not read its stream; another receives every event.
func TestSlowReaderDelaysNoOtherStream(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 5000})
	slow := s.dial()
	require.NoError(t, slow.(*net.TCPConn).SetReadBuffer(1))
	_, err := fmt.Fprintf(slow, "GET /v1/sales/%s/events HTTP/1.1\r\nHost: shop\r\n\r\n", sale)
	require.NoError(t, err)
	testkit.Eventually(t, 10*time.Second, "the stream is open", func() bool { return s.server.saleStreamSlots.taken.Load() == 1 })
	w := s.watch("/v1/sales/" + sale.String() + "/events")
	_, ok := w.next()
	require.True(t, ok)
	// The test makes the updates, because a sale does not change often enough to fill the socket.
	sales := s.server.saleFeed
	give := func(news saleUpdate) {
		sales.mu.Lock()
		defer sales.mu.Unlock()
		sales.items[sale].send(news)
	}
	filler := strings.Repeat("x", 256<<10)
	sold := func(n int) saleUpdate {
		return saleUpdate{data: fmt.Appendf(nil, `{"sold":%d,"filler":%q}`, n, filler)}
	}
	const last = 30 // more than the 4 MiB that Linux buffers, and read quickly by the other client
	for n := range last {
		give(sold(n))
	}
	testkit.Eventually(t, 40*time.Second, "the other one hears the last", func() bool {
		give(sold(last)) // again, because an update of the feed itself may have replaced it
		for {
			select {
			case e, ok := <-w.events:
				require.True(t, ok)
				if e.data["sold"] == float64(last) {
					return true
				}
			default:
				return false
			}
		}
	})
	require.EqualValues(t, 2, s.server.saleStreamSlots.taken.Load())
	// A client that reads nothing for eventTimeout is cut off.
	testkit.Eventually(t, 6*eventTimeout, "the slow one is cut off", func() bool {
		give(saleUpdate{data: fmt.Appendf(nil, `{"at":%d,"filler":%q}`, time.Now().UnixNano(), filler)})
		return s.server.saleStreamSlots.taken.Load() == 1
	})
}

func TestStopEndsThousandStreams(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _ := s.order(sale, "ada")
	const streams = 1000
	conns := make([]net.Conn, streams)
	for i := range conns {
		conns[i] = s.dial()
		target := path
		if i%2 == 0 {
			target = "/v1/sales/" + sale.String()
		}
		_, err := fmt.Fprintf(conns[i], "GET %s/events HTTP/1.1\r\nHost: shop\r\nX-User-ID: ada\r\n\r\n", target)
		require.NoError(t, err)
	}
	testkit.Eventually(t, 30*time.Second, "all streams are open", func() bool {
		return s.server.saleStreamSlots.taken.Load()+s.server.orderStreamSlots.taken.Load() == streams
	})
	for _, conn := range conns {
		line, err := bufio.NewReader(conn).ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "HTTP/1.1 200 OK\r\n", line)
	}
	began := time.Now()
	stop()
	require.NoError(t, <-ended)
	took := time.Since(began)
	t.Logf("stopped after %v", took)
	require.Less(t, took, s.server.config.DrainTimeout/2)
	for _, conn := range conns {
		_, err := io.Copy(io.Discard, conn)
		require.NoError(t, err)
	}
}

// All streams see reservation, payment, pause and restock, at the cost of one query.
func TestSaleStreamSendsEachChange(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	streams := []*eventReader{s.watch("/v1/sales/" + sale.String() + "/events"), s.watch("/v1/sales/" + sale.String() + "/events")}
	// Changes in quick succession may arrive as one event, so the test waits for the last.
	tells := func(state string, stock, available, held, sold float64) {
		t.Helper()
		want := map[string]any{"state": state, "stock": stock, "available": available, "held": held, "sold": sold}
		for _, w := range streams {
			for e, ok := w.next(); ; e, ok = w.next() {
				require.True(t, ok)
				require.Equal(t, []string{"sale", ""}, []string{e.name, e.id})
				require.NotEqual(t, w.last, e.data, "only changes are sent")
				if w.last = e.data; e.data["held"] == held && e.data["sold"] == sold && e.data["state"] == state && e.data["stock"] == stock {
					require.Equal(t, want, e.data)
					break
				}
			}
		}
	}
	tells("open", 10, 10, 0, 0)
	path, _, _ := s.purchased(sale, "ada")
	tells("open", 10, 9, 1, 0)
	s.awaitStatus(path, "ada", reservation.StatusConfirmed)
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	tells("open", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator).is(http.StatusOK)
	tells("paused", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator).is(http.StatusOK)
	tells("paused", 15, 14, 0, 1)
	streams = append(streams[:0:0], s.watch("/v1/sales/"+sale.String()+"/events"))
	tells("paused", 15, 14, 0, 1)
	select {
	case e := <-streams[0].events:
		t.Fatalf("nothing has changed: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	s.server.saleFeed.mu.Lock()
	require.Len(t, s.server.saleFeed.items, 1)
	s.server.saleFeed.mu.Unlock()
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
		testkit.Eventually(t, 10*time.Second, "no subscriber is left", func() bool {
			s.server.saleFeed.mu.Lock()
			defer s.server.saleFeed.mu.Unlock()
			item, known := s.server.saleFeed.items[sale]
			return !known || len(item.subscribers) == 0
		})
	}
	testkit.Eventually(t, 20*time.Second, "the item is forgotten", func() bool {
		s.server.saleFeed.mu.Lock()
		defer s.server.saleFeed.mu.Unlock()
		return len(s.server.saleFeed.items) == 0
	})
}

func TestStreamOutlivesConnectionTimeouts(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(sale, "ada")
	conn := s.dial()
	require.NoError(t, conn.SetDeadline(time.Now().Add(3*heartbeatInterval)))
	_, err := fmt.Fprintf(conn, "GET %s/events HTTP/1.1\r\nHost: shop\r\nX-User-ID: ada\r\n\r\n", path)
	require.NoError(t, err)
	began := time.Now()
	lines := bufio.NewReader(conn)
	for line := ""; line != ": \n"; {
		line, err = lines.ReadString('\n')
		require.NoError(t, err)
	}
	require.Greater(t, time.Since(began), max(readTimeout, writeTimeout))
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	for line := ""; line != "event: paid\n"; {
		line, err = lines.ReadString('\n')
		require.NoError(t, err)
	}
}

// No worker announces it: the stream looks it up.
func TestOrderStreamSendsVoidedAfterRedisLoss(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ada")
	w, without := s.watch(withReceipt(path+"/events", receipt), as("ada")), s.watch(path+"/events", as("ada"))
	w.receivesStatus(reservation.StatusReserved, 1)
	without.receivesStatus(reservation.StatusReserved, 1)
	s.loseReservations(sale)
	s.raiseEpoch(sale)
	w.receivesStatus(reservation.StatusVoided, 2)
	w.receivesEnd()
	without.receivesEnd()
}
