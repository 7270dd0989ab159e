//go:build system

package main

import (
	"compress/gzip"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
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
					len(s.collector.Named(ann.trace, "record order")) > 0 && len(s.collector.Named(ann.trace, "ack")) > 0 &&
					s.requests(ann) > 0
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
			assert.Contains(t, []string{"127.0.0.1", ""}, got.Attributes["server.address"], "a plain purchase has none")
			delete(got.Attributes, "server.address")
			assert.Equal(t, map[string]string{
				"http.request.method": "POST", "http.route": "/v1/sales/:sale/orders", "http.response.status_code": "202",
				"url.path": "/v1/sales/" + sale.String() + "/orders", "url.scheme": "http",
				"stampede.sale_id": sale.String(), "stampede.order_id": order, "stampede.verdict": "reserved",
			}, got.Attributes)
			below("wait in line", got, "stampede-ingress")
			call := below("reserve.lua", got, "stampede-ingress")
			below("wait in stream", call, "stampede-worker")
			below("wait for batch", call, "stampede-worker")
			recorded := below("record order", call, "stampede-worker")
			assert.Equal(t, "redis", recorded.Attributes["messaging.system"])
			assert.Equal(t, "settle", below("ack", call, "stampede-worker").Attributes["messaging.operation.type"])
			assert.Equal(t, order, recorded.Attributes["stampede.order_id"])
			assert.Equal(t, "confirmed", recorded.Attributes["stampede.status"])
			assert.Regexp(t, `^\d+-\d+$`, recorded.Attributes["messaging.message.id"])
			batch := below("batch", recorded, "stampede-worker")
			below("lock_acquire.lua", batch, "stampede-worker")
			below("lock_release.lua", batch, "stampede-worker")
			transaction := below("transaction", batch, "stampede-worker")
			statements := below("BATCH", transaction, "stampede-worker")
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

// A worker dies before or after its COMMIT. Another one claims the entry, and the trace goes on.
func TestTraceOutlivesKilledWorker(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforePersist, crashpoint.AfterCommit} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := newTracedShop(t)
			_, url := s.serve()
			victim := s.traced(s.worker("first"))
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			events := s.hears()
			ann := newClient()
			order := buys(t, url, s.sale(url, 10), "ann", ann.parent())
			victim.WaitKilled(within)
			s.traced(s.worker("second")).Start()
			testkit.Eventually(t, within, "the rest of the trace", func() bool {
				header, _ := events.got(order)
				return header != "" && len(s.collector.Named(ann.trace, "deliver event")) > 0 &&
					len(s.collector.Named(ann.trace, "record order")) > 0 && s.requests(ann) > 0
			})
			recorded := s.only(ann.trace, "record order")
			assert.Equal(t, s.only(ann.trace, "reserve.lua").ID, recorded.Parent)
			assert.Equal(t, "confirmed", recorded.Attributes["stampede.status"])
			repeat := recorded.Attributes["stampede.repeat"] != ""
			assert.Equal(t, point == crashpoint.AfterCommit, repeat)
			delivered := s.only(ann.trace, "deliver event")
			if !repeat { // else its parent died with the worker
				assert.Equal(t, recorded.ID, delivered.Parent)
			}
		})
	}
}

// The event of a payment is in the trace of the payment.
func TestPaymentIsTracedToItsEvent(t *testing.T) {
	t.Parallel()
	s := newTracedShop(t)
	_, url := s.serve()
	s.traced(s.worker("worker")).Start()
	events := s.hears()
	order := buys(t, url, s.payableSale("10", "1h"), "ann", "")
	at := url + "/v1/orders/" + order
	testkit.Eventually(t, within, "the confirmation", func() bool {
		return ask(t, http.MethodGet, at, "ann", "").Status == "confirmed"
	})
	payer := newClient()
	status, text := request(t, http.MethodPost, at+"/pay", "ann", payer.parent(), `{"reference":"pi_1"}`)
	require.Equal(t, http.StatusOK, status, text)
	testkit.Eventually(t, within, "the event of the payment", func() bool {
		header, _ := events.got(order)
		return header != "" && len(s.collector.Named(payer.trace, "deliver event")) > 0 &&
			len(s.collector.Named(payer.trace, "POST /v1/orders/:order/pay")) > 0
	})
	paid := s.only(payer.trace, "POST /v1/orders/:order/pay")
	assert.Equal(t, order, paid.Attributes["stampede.order_id"])
	assert.Equal(t, paid.ID, s.only(payer.trace, "deliver event").Parent)
	assert.NotEmpty(t, s.collector.Named(payer.trace, "ledger/change_orders"))
	_, body := events.got(order)
	assert.Contains(t, body, "stampede.order.paid")
	assert.Contains(t, body, paid.TraceParent())
}

// metric returns the value of a series.
func metric(t *testing.T, url, series string) float64 {
	t.Helper()
	for _, line := range scrape(t, url) {
		if text, ok := strings.CutPrefix(line, series+" "); ok {
			value, err := strconv.ParseFloat(text, 64)
			require.NoError(t, err)
			return value
		}
	}
	t.Fatalf("there is no series %s", series)
	return 0
}

// Parents come from clients. Those that are not valid are none, and of a flood of valid ones few are traced.
func TestClientsCannotFloodCollector(t *testing.T) {
	t.Parallel()
	const rate, flood = 5, 200
	s := newTracedShop(t)
	began := time.Now()
	_, url := s.serve("STAMPEDE_TRACES_PER_SECOND", strconv.Itoa(rate))
	sale := s.sale(url, flood+100)
	good := newClient().parent()
	for i, bad := range []string{
		"x", strings.Repeat("0", 55), good[:54], good + "0", good + "-00", "ff" + good[2:], "0g" + good[2:],
		"01" + good[2:] + "x",
		strings.ToUpper(good), strings.Replace(good, "-", "_", 1), "00-" + strings.Repeat("0", 32) + good[35:],
		good[:36] + strings.Repeat("0", 16) + good[52:], good + ", " + good, strings.Repeat(good, 50), good[:53] + "00",
	} {
		buys(t, url, sale, fmt.Sprintf("bad-%d", i), bad)
	}
	require.Zero(t, metric(t, url, "stampede_traces_over_rate_total"), "none of them was a parent")
	var buying sync.WaitGroup
	for i := range flood {
		buying.Go(func() { buys(t, url, sale, fmt.Sprintf("user-%d", i), newClient().parent()) })
	}
	buying.Wait()
	allowed := rate + int(rate*time.Since(began).Seconds()) + 1
	over := int(metric(t, url, "stampede_traces_over_rate_total"))
	require.GreaterOrEqual(t, over, flood-allowed)
	testkit.Eventually(t, within, "the spans of the others", func() bool {
		return len(s.collector.Named("", "POST /v1/sales/:sale/orders")) == flood-over
	})
	require.Len(t, s.collector.Named("", "wait in line"), flood-over)
}

// However a collector fails, purchases are answered and reach Postgres; what it does not take is counted.
func TestCollectorThatFailsHarmsNoPurchase(t *testing.T) {
	t.Parallel()
	hanging := make(chan struct{})
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hanging }))
	t.Cleanup(silent.Close)
	t.Cleanup(func() { close(hanging) })
	refusing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
	}))
	t.Cleanup(refusing.Close)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	for name, endpoint := range map[string]string{
		"hangs": silent.URL, "refuses": refusing.URL, "is gone": "http://" + closed.Addr().String(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTracedShop(t)
			s.collector.URL = endpoint
			ingress, url := s.serve("STAMPEDE_TRACES_PER_SECOND", "10000")
			worker := s.traced(s.worker("worker"))
			worker.Start()
			sale := s.sale(url, 1000)
			var buying sync.WaitGroup
			for i := range 300 {
				buying.Go(func() { buys(t, url, sale, fmt.Sprintf("user-%d", i), newClient().parent()) })
			}
			buying.Wait()
			testkit.Eventually(t, within, "all orders", func() bool {
				return s.count("SELECT count(*) FROM orders") == 300
			})
			testkit.Eventually(t, within, "what was not taken", func() bool {
				return metric(t, url, `stampede_trace_spans_total{result="dropped"}`) > 0
			})
			require.Zero(t, metric(t, url, `stampede_trace_spans_total{result="exported"}`))
			began := time.Now()
			require.True(t, ingress.Stop().Success(), ingress.Output())
			require.True(t, worker.Stop().Success(), worker.Output())
			require.Less(t, time.Since(began), 20*time.Second, "a stop waits for no collector")
		})
	}
}

// What waits for its export is exported by a stop.
func TestStopExportsLastSpans(t *testing.T) {
	t.Parallel()
	s := newTracedShop(t)
	ingress, url := s.serve("OTEL_BSP_SCHEDULE_DELAY", "3600000")
	ann := newClient()
	buys(t, url, s.sale(url, 10), "ann", ann.parent())
	require.True(t, ingress.Stop().Success(), ingress.Output())
	require.Equal(t, 1, s.requests(ann))
}

func TestSettingsOfOpenTelemetryThatCannotBeFollowedAreRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for want, setting := range map[string][2]string{
		"want http/protobuf":    {"OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"},
		"want otlp or none":     {"OTEL_TRACES_EXPORTER", "zipkin"},
		"http://collector:4318": {"OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"},
	} {
		c := s.ingress()
		c.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
		c.Setenv(setting[0], setting[1])
		c.Start()
		require.Equal(t, exitUsage, c.Wait(within).ExitCode(), c.Output())
		require.Contains(t, c.Output(), want)
	}
}

// Profiles are for operators: on request, and never where buyers are.
func TestProfilesAreServedToOperatorsOnly(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const heap, processor, commandLine = "/debug/pprof/heap", "/debug/pprof/profile?seconds=1", "/debug/pprof/cmdline"
	services := map[string]func() *testkit.Cmd{
		"ingress": func() *testkit.Cmd { return s.ingress() },
		"worker":  func() *testkit.Cmd { return s.worker("worker") },
		"relay":   s.relay,
		"dev": func() *testkit.Cmd {
			c := s.command("dev")
			c.Setenv("STAMPEDE_HTTP_ADDR", "127.0.0.1:0")
			return c
		},
	}
	for name, service := range services {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			without := service()
			without.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
			without.Start()
			operators := "http://" + loggedAddr(without, "metrics are served")
			status, _ := call(t, http.MethodGet, operators+heap, "")
			require.Equal(t, http.StatusNotFound, status)

			with := service()
			with.Setenv("STAMPEDE_CONSUMER", name) // two workers on one host
			with.Setenv("STAMPEDE_METRICS_ADDR", "127.0.0.1:0")
			with.Setenv("STAMPEDE_PPROF", "true")
			with.Start()
			operators = "http://" + loggedAddr(with, "metrics are served")
			for path, unit := range map[string]string{heap: "inuse_space", processor: "nanoseconds"} {
				status, profile := call(t, http.MethodGet, operators+path, "")
				require.Equal(t, http.StatusOK, status)
				unpacked, err := gzip.NewReader(strings.NewReader(profile))
				require.NoError(t, err)
				text, err := io.ReadAll(unpacked)
				require.NoError(t, err)
				require.Contains(t, string(text), unit)
			}
			status, _ = call(t, http.MethodGet, operators+commandLine, "")
			require.Equal(t, http.StatusNotFound, status, "it may hold secrets")
			if name == "ingress" {
				testkit.Eventually(t, within, "it is ready", func() bool {
					status, _ := call(t, http.MethodGet, operators+"/readyz", "")
					return status == http.StatusOK
				})
				require.NotEmpty(t, scrape(t, operators))
				buyers := "http://" + loggedAddr(with, "ingress listens")
				for _, path := range []string{heap, processor, "/debug/pprof/", commandLine} {
					status, _ := call(t, http.MethodGet, buyers+path, "")
					require.Equal(t, http.StatusNotFound, status, path)
				}
			}
		})
	}
}

func TestProfilesNeedListenerOfOperators(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, command := range []string{"serve", "dev"} {
		c := s.command(command, "--pprof")
		c.Setenv("STAMPEDE_AUTH", "header")
		c.Start()
		require.Equal(t, exitUsage, c.Wait(within).ExitCode())
		require.Contains(t, c.Output(), "set STAMPEDE_METRICS_ADDR or --metrics-addr")
	}
}
