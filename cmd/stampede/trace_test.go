//go:build system

package main

import (
	"crypto/rand"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// tracedShop is a shop whose processes export to a collector of the test.
type tracedShop struct {
	*shop
	collector *testkit.Collector
}

func newTracedShop(t *testing.T) *tracedShop {
	t.Helper()
	return &tracedShop{newShop(t), testkit.NewCollector(t)}
}

func (s *tracedShop) traced(c *testkit.Cmd) *testkit.Cmd {
	c.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", s.collector.URL)
	c.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50") // ms
	return c
}

// serve starts an ingress that traces.
func (s *tracedShop) serve(settings ...string) (*testkit.Cmd, string) {
	s.t.Helper()
	c := s.traced(s.ingress())
	for i := 0; i < len(settings); i += 2 {
		c.Setenv(settings[i], settings[i+1])
	}
	c.Start()
	return c, "http://" + loggedAddr(c, "ingress listens")
}

func newClient() client {
	id := make([]byte, 24)
	_, _ = rand.Read(id) // never fails
	text := hex.EncodeToString(id)
	return client{text[:32], text[32:]}
}

func (c client) parent() string { return "00-" + c.trace + "-" + c.span + "-01" }

// request makes a request with this traceparent, unless that is empty.
func request(t testing.TB, method, url, user, parent, body string) (status int, text string) {
	t.Helper()
	headers := []string{"X-User-ID", user}
	if parent != "" {
		headers = append(headers, "traceparent", parent)
	}
	return call(t, method, url, body, headers...)
}

// buys buys a unit and returns the order.
func buys(t testing.TB, url string, sale uuid.UUID, user, parent string) string {
	t.Helper()
	status, answer := request(t, http.MethodPost, url+"/v1/sales/"+sale.String()+"/orders", user, parent, "{}")
	require.Equal(t, http.StatusAccepted, status, answer)
	_, order, _ := strings.Cut(answer, `"order_id":"`)
	return order[:36]
}

// receiver takes the events of a relay.
type receiver struct {
	url string
	mu  sync.Mutex
	// header and body are those of the newest event of each order.
	header, body map[string]string
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{header: map[string]string{}, body: map[string]string{}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		body, _ := io.ReadAll(request.Body)
		order, _, _ := strings.Cut(request.Header.Get("webhook-id"), ".")
		r.mu.Lock()
		r.header[order], r.body[order] = request.Header.Get("traceparent"), string(body)
		r.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

func (r *receiver) got(order string) (header, body string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.header[order], r.body[order]
}

// hears starts a relay with a target for all events.
func (s *tracedShop) hears() *receiver {
	s.t.Helper()
	hook := newWebhookShop(s.t)
	r := newReceiver(s.t)
	s.ends(exitOK, "relay", "add", "shop", r.url, "--secret-file", hook.secretFile, "--allow-private")
	s.traced(s.relay()).Start()
	return r
}

// only returns the one span of a trace with that name.
func (s *tracedShop) only(trace, name string) testkit.Span {
	s.t.Helper()
	found := s.collector.Named(trace, name)
	require.Len(s.t, found, 1, "%s in\n%s", name, s.collector.Tree(trace))
	return found[0]
}

// A purchase whose client samples it is one trace, from the request to the event in the shop. Others leave nothing.
func TestPurchaseIsOneTraceThroughAllProcesses(t *testing.T) {
	t.Parallel()
	for _, reader := range []string{"on", "off"} {
		t.Run("plain reader "+reader, func(t *testing.T) {
			t.Parallel()
			s := newTracedShop(t)
			_, url := s.serve("STAMPEDE_PLAIN_READER", reader)
			s.traced(s.worker("worker")).Start()
			events := s.hears()
			sale := s.sale(url, 10)
			ann := newClient()
			other := buys(t, url, sale, "bob", "")
			unsampled := buys(t, url, sale, "cid", strings.TrimSuffix(newClient().parent(), "1")+"0")
			order := buys(t, url, sale, "ann", ann.parent())
			testkit.Eventually(t, within, "all events, and the last span", func() bool {
				a, _ := events.got(order)
				_, b := events.got(other)
				_, c := events.got(unsampled)
				return a != "" && b != "" && c != "" && len(s.collector.Named(ann.trace, "deliver event")) > 0 &&
					len(s.collector.Named(ann.trace, "record order")) > 0 && s.requests(ann) > 0
			})
			t.Log("\n" + s.collector.Tree(ann.trace))

			below := func(name string, parent testkit.Span, service string) testkit.Span {
				span := s.only(ann.trace, name)
				assert.Equal(t, parent.ID, span.Parent, name)
				assert.Equal(t, service, span.Service, name)
				assert.False(t, span.Failed, name)
				return span
			}
			got := below("POST /v1/sales/:sale/orders", testkit.Span{ID: ann.span}, "stampede-ingress")
			assert.Equal(t, map[string]string{
				"http.request.method": "POST", "http.route": "/v1/sales/:sale/orders", "http.response.status_code": "202",
				"stampede.sale_id": sale.String(), "stampede.order_id": order, "stampede.verdict": "reserved",
			}, got.Attributes)
			below("wait in line", got, "stampede-ingress")
			call := below("reserve.lua", got, "stampede-ingress")
			recorded := below("record order", call, "stampede-worker")
			assert.Equal(t, order, recorded.Attributes["stampede.order_id"])
			assert.Equal(t, "confirmed", recorded.Attributes["stampede.status"])
			assert.Regexp(t, `^\d+-\d+$`, recorded.Attributes["stampede.entry_id"])
			batch := below("batch", recorded, "stampede-worker")
			transaction := below("transaction", batch, "stampede-worker")
			statements := below("batch start", transaction, "stampede-worker")
			below("ledger/record_fresh", statements, "stampede-worker")
			below("COMMIT", statements, "stampede-worker")
			delivered := below("deliver event", recorded, "stampede-relay")

			header, body := events.got(order)
			assert.Equal(t, delivered.TraceParent(), header)
			assert.Contains(t, body, `"traceparent":"`+recorded.TraceParent()+`"`)
			for _, id := range []string{other, unsampled} {
				header, body := events.got(id)
				assert.Empty(t, header)
				assert.NotContains(t, body, "traceparent")
			}
			known := map[string]bool{ann.span: true}
			for _, span := range s.collector.Spans() {
				known[span.ID] = true
			}
			for _, span := range s.collector.Spans() {
				assert.Equal(t, ann.trace, span.Trace, "%v", span)
				assert.True(t, known[span.Parent], "%v", span)
				for _, value := range span.Attributes {
					assert.NotContains(t, value, "ann", "no user in a trace")
				}
			}
		})
	}
}

// requests is how many purchases of this client the collector has.
func (s *tracedShop) requests(by client) int {
	return len(s.collector.Named(by.trace, "POST /v1/sales/:sale/orders"))
}
