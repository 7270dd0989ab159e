//go:build system

package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
)

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
				var orders int
				require.NoError(t, s.pool.QueryRow(t.Context(), "SELECT count(*) FROM orders").Scan(&orders))
				return orders == 300
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
