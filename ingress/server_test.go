package ingress

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

func TestStopFinishesAcceptedRequests(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	idle, conn := s.dial(), s.dial()
	conn.sends(s.head(sale, "ada", "Content-Length: 2\r\nExpect: 100-continue\r\n"))
	conn.receivesContinue()
	stop()
	testkit.Eventually(t, 30*time.Second, "connections are refused", func() bool {
		c, err := net.Dial("tcp", s.server.listenAddr()) //nolint:noctx // closed immediately
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	require.Empty(t, ended)

	conn.sends("{}")
	conn.receives().is(http.StatusAccepted)
	require.NoError(t, idle.Close())
	require.NoError(t, <-ended)
	require.EqualValues(t, 1, s.stock(sale).Orders)
}

// Without the plain reader, net/http serves purchases as well.
func TestPurchasesWithoutPlainReader(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t, func(c *Config) { c.PlainReader = false })
	const crowd, stock = 20, 5
	sale := s.sale(reservation.Terms{Stock: stock})
	var accepted atomic.Int64
	var buyers sync.WaitGroup
	for i := range crowd {
		buyers.Go(func() {
			r := s.buy(sale, "", as(fmt.Sprint("buyer-", i)))
			if r.status == http.StatusAccepted {
				accepted.Add(1)
				return
			}
			r.isProblem(http.StatusConflict, "sold-out")
		})
	}
	buyers.Wait()
	require.EqualValues(t, stock, accepted.Load())
	require.EqualValues(t, stock, s.stock(sale).Orders)

	replayed := s.sale(reservation.Terms{Stock: 2})
	first := s.buy(replayed, "", as("ada"), withKey("k")).is(http.StatusAccepted)
	require.Equal(t, first, s.buy(replayed, "", as("ada"), withKey("k")).is(http.StatusAccepted))

	slots := &s.server.inFlight.purchases
	free := slots.limit - slots.taken.Load()
	slots.taken.Add(free)
	s.buy(replayed, "", as("bob")).isProblem(http.StatusServiceUnavailable, "overloaded")
	slots.taken.Add(-free)

	conn := s.dial()
	conn.sends(s.head(replayed, "bob", "Content-Length: 2\r\nExpect: 100-continue\r\n"))
	conn.receivesContinue()
	stop()
	testkit.Eventually(t, 30*time.Second, "the server stops", s.server.stopping.Load)
	conn.sends("{}")
	conn.receives().is(http.StatusAccepted)
	conn.receivesEnd()
	require.NoError(t, <-ended)
	require.Zero(t, testutil.ToFloat64(s.server.metrics.plainPurchases))
}

// The cancelled request is answered.
func TestStopCancelsRequestsAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t, func(c *Config) { c.DrainTimeout = 100 * time.Millisecond })
	s.lock("sales")
	conn := s.dial()
	conn.sends("GET /v1/sales HTTP/1.1\r\nHost: shop\r\n\r\n")
	testkit.Eventually(t, 30*time.Second, "a request hangs in Postgres", func() bool {
		return s.server.inFlight.taken() == 1
	})
	stop()
	require.ErrorContains(t, <-ended, "1 requests were not finished after 100ms")
	require.Equal(t, http.StatusServiceUnavailable, conn.receives().status)
	require.Zero(t, s.server.inFlight.taken())
}

// A load balancer sees it before connections are refused.
func TestStoppingServerIsNotReady(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s, stop, ended := runShop(t, func(c *Config) { c.Listener, c.StopDelay = listener, time.Minute })
	sale := s.sale(reservation.Terms{Stock: 1})
	require.Equal(t, listener.Addr().String(), s.server.listenAddr())
	s.get("/readyz").is(http.StatusOK)
	stop()
	testkit.Eventually(t, 30*time.Second, "it is not ready", func() bool {
		return s.get("/readyz").status == http.StatusServiceUnavailable
	})
	s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	s.awaitMetrics(`stampede_ready{process="ingress",reason="This server is stopping"} 0`)
	s.get("/livez").is(http.StatusOK)
	conn := s.dial()
	conn.sends(s.head(sale, "ada"))
	r := conn.receives()
	r.is(http.StatusAccepted)
	require.True(t, r.closes, "the next request goes to another server")

	// A listener that fails ends the server before StopDelay is over.
	require.NoError(t, listener.Close())
	require.ErrorIs(t, <-ended, net.ErrClosed)
}

func TestRunFailsIfAddressIsInUse(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	other := prepareShop(
		t,
		sharedServers(t),
		func(c *Config) { c.Addr = s.server.listenAddr() },
	)
	require.ErrorContains(t, other.server.Run(t.Context()), "address already in use")
}

// net/http discards what is written later than accept.WriteTimeout after the head.
func TestWriteTimeoutCoversLongestWork(t *testing.T) {
	t.Parallel()
	for what, work := range map[string]time.Duration{
		"a purchase": reservation.DefaultWaitMax + reservation.DefaultCallTimeout, "an operator's call": catalogTimeout,
		"a look at an order": 2*orderTimeout + reservedTimeout,
	} {
		require.Greater(t, accept.WriteTimeout, accept.ReadTimeout+work+time.Second, what)
	}
}

func TestSlowHeadIsCutOff(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	conn := s.dial()
	conn.sends("GET /livez HTTP/1.1\r\nHost: shop\r\nX-Slow: ")
	began := time.Now()
	_, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Less(t, time.Since(began), accept.ReadTimeout)
}

// Each call below /v1 but a purchase has a class, with durations by outcome. A stream counts when it begins.
func TestEachClassOfCallsHasDurations(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	for _, r := range s.server.router.routes {
		wants := strings.HasPrefix(r.path, "/v1/") && r.path != purchasePath
		require.Equal(t, wants, r.class != untimed, "%s %s", r.method, r.path)
	}
	path, _ := s.order(s.sale(reservation.Terms{Stock: 1}), "ada")
	s.get(path, as("ada")).is(http.StatusOK)
	s.get(path, as("ada")).is(http.StatusOK)
	s.get(path).isProblem(http.StatusUnauthorized, "unauthorized")
	s.pay(path, "r", as("ada")).isProblem(http.StatusConflict, "order-not-confirmed")
	s.get("/v1/sales").is(http.StatusOK)
	s.post("/v1/sales", "{}").isProblem(http.StatusUnauthorized, "unauthorized")
	s.get(path+"/events").isProblem(http.StatusUnauthorized, "unauthorized")
	conn := s.dial()
	conn.sends("GET " + path + "/events HTTP/1.1\r\nHost: shop\r\nX-User-ID: ada\r\n\r\n")
	s.awaitMetrics(
		`stampede_http_request_duration_seconds_count{class="event-stream",outcome="ok"} 1`,
		`stampede_http_request_duration_seconds_count{class="event-stream",outcome="refused"} 1`,
		`stampede_http_request_duration_seconds_count{class="operator",outcome="refused"} 1`,
		`stampede_http_request_duration_seconds_count{class="order-change",outcome="refused"} 1`,
		`stampede_http_request_duration_seconds_count{class="order-read",outcome="ok"} 2`,
		`stampede_http_request_duration_seconds_count{class="order-read",outcome="refused"} 1`,
		`stampede_http_request_duration_seconds_count{class="sale-read",outcome="ok"} 1`,
	)
	series := strings.Count(s.get("/metrics").body, "stampede_http_request_duration_seconds_count{")
	require.Equal(t, 5*3, series, "classes and outcomes")
}

// awaitMetrics waits until /metrics has these lines.
func (s *shop) awaitMetrics(lines ...string) {
	s.t.Helper()
	for _, line := range lines {
		testkit.Eventually(s.t, 30*time.Second, line, func() bool {
			return strings.Contains(s.get("/metrics").body, "\n"+line+"\n")
		})
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1})
	s.buy(sale, "", as("ada"), withKey("k")).is(http.StatusAccepted)
	s.buy(sale, "", as("ada"), withKey("k")).is(http.StatusAccepted)
	s.buy(sale, "", as("bob")).isProblem(http.StatusConflict, "sold-out")
	s.buy(sale, "x", as("bob")).isProblem(http.StatusBadRequest, "invalid-request")
	s.get("/nowhere").isProblem(http.StatusNotFound, "not-found")
	text := s.get("/metrics").body
	for _, line := range []string{
		`stampede_purchases_total{verdict="reserved"} 1`,
		`stampede_purchases_total{verdict="replayed"} 1`,
		`stampede_purchases_total{verdict="sold-out"} 1`,
		`stampede_purchases_total{verdict="overloaded"} 0`,
		`stampede_purchase_duration_seconds_count{outcome="accepted"} 2`,
		`stampede_purchase_duration_seconds_count{outcome="refused"} 1`,
		`stampede_http_requests_total{route="POST /v1/sales/:sale/orders",status="2xx"} 2`,
		`stampede_http_requests_total{route="POST /v1/sales/:sale/orders",status="4xx"} 2`,
		`stampede_http_requests_total{route="unmatched",status="4xx"} 1`,
		`stampede_http_requests_in_flight 0`,
		`stampede_http_requests_in_flight_limit 4096`,
	} {
		require.Contains(t, text, line+"\n")
	}
}
