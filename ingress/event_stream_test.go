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
