package ingress

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// runShop starts a shop by Run. It returns what stops it, and the channel of Run's error.
func runShop(t *testing.T, change ...func(*Config)) (*shop, context.CancelFunc, <-chan error) {
	t.Helper()
	s := prepareShop(t, servers{testkit.RedisURL(t), testkit.DatabaseURL(t), testkit.Keys(t)},
		append([]func(*Config){func(c *Config) { c.Addr = "127.0.0.1:0" }}, change...)...)
	stop, ended := s.run()
	return s, stop, ended
}

func TestStopFinishesAcceptedRequests(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	idle, conn := s.dial(), s.dial()
	_, err := io.WriteString(conn, s.head(sale, "ada", "Content-Length: 2\r\nExpect: 100-continue\r\n"))
	require.NoError(t, err)
	// net/http sends this when the handler begins to read the body.
	const goOn = "HTTP/1.1 100 Continue\r\n\r\n"
	received := make([]byte, len(goOn))
	_, err = io.ReadFull(conn, received)
	require.NoError(t, err)
	require.Equal(t, goOn, string(received))
	stop()
	testkit.Eventually(t, 30*time.Second, "connections are refused", func() bool {
		c, err := net.Dial("tcp", s.server.listenAddr()) //nolint:noctx // closed immediately
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	require.Empty(t, ended)

	_, err = io.WriteString(conn, `{}`)
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusAccepted, res.StatusCode)
	require.NoError(t, idle.Close())
	require.NoError(t, <-ended)
	require.EqualValues(t, 1, s.stock(sale).Orders)
}

// The cancelled request is answered.
func TestStopCancelsRequestsAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	s, stop, ended := runShop(t, func(c *Config) { c.DrainTimeout = 100 * time.Millisecond })
	s.lock("sales")
	conn := s.dial()
	_, err := io.WriteString(conn, "GET /v1/sales HTTP/1.1\r\nHost: shop\r\n\r\n")
	require.NoError(t, err)
	testkit.Eventually(t, 30*time.Second, "a request hangs in Postgres", func() bool {
		return s.server.inFlight.taken() == 1
	})
	stop()
	require.ErrorContains(t, <-ended, "1 requests were not finished after 100ms")
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusServiceUnavailable, res.StatusCode)
	require.Zero(t, s.server.inFlight.taken())
}

// A load balancer sees it before connections are refused.
func TestStoppingServerIsNotReady(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s, stop, ended := runShop(t, func(c *Config) { c.Listener, c.StopDelay = listener, time.Minute })
	sale := s.sale(reservation.Terms{Stock: 1})
	s.get("/readyz").is(http.StatusOK)
	stop()
	testkit.Eventually(t, 30*time.Second, "it is not ready", func() bool {
		return s.get("/readyz").status == http.StatusServiceUnavailable
	})
	s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	s.get("/livez").is(http.StatusOK)
	conn := s.dial()
	_, err = io.WriteString(conn, s.head(sale, "ada"))
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusAccepted, res.StatusCode)
	require.True(t, res.Close, "the next request goes to another server")

	// A listener that fails ends the server before StopDelay is over.
	require.NoError(t, listener.Close())
	require.ErrorIs(t, <-ended, net.ErrClosed)
}

func TestRunFailsIfAddressIsInUse(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	other := prepareShop(
		t,
		servers{testkit.RedisURL(t), testkit.DatabaseURL(t), testkit.Keys(t)},
		func(c *Config) { c.Addr = s.server.listenAddr() },
	)
	require.ErrorContains(t, other.server.Run(t.Context()), "address already in use")
}

func TestRunServesGivenListener(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := prepareShop(
		t, servers{testkit.RedisURL(t), testkit.DatabaseURL(t), testkit.Keys(t)}, func(c *Config) { c.Listener = listener },
	)
	require.Equal(t, listener.Addr().String(), s.server.listenAddr())
	s.url = "http://" + s.server.listenAddr()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.server.Run(ctx) }()
	s.get("/livez").is(http.StatusOK)
	stop()
	require.NoError(t, <-ended)
}

// net/http discards what is written later than writeTimeout after the head.
func TestWriteTimeoutCoversLongestWork(t *testing.T) {
	t.Parallel()
	for what, work := range map[string]time.Duration{
		"a purchase": reservation.DefaultWaitMax + reservation.DefaultCallTimeout, "an operator's call": catalogTimeout,
		"a look at an order": 2*orderTimeout + reservedTimeout,
	} {
		require.Greater(t, writeTimeout, readTimeout+work+time.Second, what)
	}
}

func TestSlowHeadIsCutOff(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	conn := s.dial()
	_, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: shop\r\nX-Slow: ")
	require.NoError(t, err)
	began := time.Now()
	_, err = io.ReadAll(conn)
	require.NoError(t, err)
	require.Less(t, time.Since(began), readTimeout)
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
