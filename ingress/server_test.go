package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/forwarded"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testkit.Main(m) }

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

// TestPlainPurchasesAreAnsweredAsOthers compares a server that reads plain purchases in front of net/http with one that
// does not: all that a purchase needs of a server is the same. How they are read is compared in internal/accept.
func TestPlainPurchasesAreAnsweredAsOthers(t *testing.T) {
	t.Parallel()
	token := func(change ...func(jwt.MapClaims)) string {
		return "Authorization: Bearer " + sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims(change...))
	}
	byVerdict := []string{"", "X-User-ID: a b"}
	for user := range decidedByName {
		byVerdict = append(byVerdict, "X-User-ID: "+user, "X-User-ID: "+user+"\r\nIdempotency-Key: k")
	}
	byOrigin := []string{
		"X-User-ID: ada", "X-User-ID: ada\r\nOrigin: https://shop.example", "X-User-ID: ada\r\nOrigin: https://evil.example",
	}
	for name, c := range map[string]struct {
		headers []string
		change  func(*Config)
		stopped bool
	}{
		"verdicts":     {byVerdict, func(*Config) {}, false},
		"tokens":       {[]string{token(), token(expiredClaim), "Authorization: Bearer x", ""}, withJWT, false},
		"some origins": {byOrigin, func(c *Config) { c.CORSOrigins = []string{"https://shop.example"} }, false},
		"any origin":   {byOrigin, func(c *Config) { c.CORSOrigins = []string{"*"} }, false},
		"users' rate": {
			[]string{"X-User-ID: ada", "X-User-ID: ada", "X-User-ID: bob"},
			func(c *Config) { c.UserLimit = Limit{Rate: .001, Burst: 1} }, false,
		},
		"addresses' rate": {
			[]string{
				"X-User-ID: a\r\nX-Forwarded-For: 192.0.2.1", "X-User-ID: b\r\nX-Forwarded-For: 192.0.2.1",
				"X-User-ID: c\r\nX-Forwarded-For: 192.0.2.2",
			},
			func(c *Config) {
				c.AddressLimit = Limit{Rate: .001, Burst: 1}
				c.TrustedProxies = forwarded.Proxies{netip.MustParsePrefix("127.0.0.0/8")}
			}, false,
		},
		"stopping": {[]string{"X-User-ID: ada"}, func(*Config) {}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var answers [2][]string
			for i, plain := range []bool{true, false} {
				s := openStub(t, func(config *Config) { config.PlainReader = plain; c.change(config) })
				s.server.stopping.Store(c.stopped)
				for _, header := range c.headers {
					answers[i] = append(answers[i], s.answerTo(t, header, "{}"), s.answerTo(t, header, `{"quantity":0}`))
				}
				want := 0
				if plain {
					want = len(answers[i])
				}
				require.EqualValues(t, want, testutil.ToFloat64(s.server.metrics.plainPurchases))
			}
			require.Equal(t, answers[1], answers[0])
		})
	}
}

func TestPanicInPlainPurchaseIsAnswered(t *testing.T) {
	t.Parallel()
	s := openStub(t, func(c *Config) { c.PlainReader = true })
	c := s.dial()
	c.sends(s.head(uuid.UUID{6: 0x70}, "panics", "Content-Length: 0\r\n"))
	c.receives().isProblem(http.StatusInternalServerError, "internal-error")
	c.sends(s.head(uuid.UUID{6: 0x70}, "ada", "Content-Length: 0\r\n"))
	c.receives().is(http.StatusAccepted)
	c.sends(s.head(uuid.UUID{6: 0x70}, "aborts", "Content-Length: 0\r\n"))
	c.receivesEnd()
	require.EqualValues(t, 3, testutil.ToFloat64(s.server.metrics.plainPurchases))
	require.Zero(t, s.server.inFlight.taken())
}

// The connection is closed, though its purchase goes on.
func TestStopClosesPlainConnAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	held := stubReservations{entered: make(chan struct{}), goOn: make(chan struct{})}
	s := prepareStub(t, func(c *Config) {
		c.PlainReader, c.Reservations, c.DrainTimeout = true, held, 100*time.Millisecond
	})
	stop, ended := s.run()
	defer close(held.goOn)
	c := s.dial()
	c.sends(s.head(uuid.UUID{6: 0x70}, "held", "Content-Length: 0\r\n"))
	select {
	case <-held.entered:
	case <-time.After(20 * time.Second):
		t.Fatal("the purchase is not decided")
	}
	stop()
	require.ErrorContains(t, <-ended, "1 requests were not finished after 100ms")
	c.receivesEnd()
}

func TestIdleConnsMakeRoom(t *testing.T) {
	t.Parallel()
	s := openStub(t, func(c *Config) { c.PlainReader, c.MaxConnections = true, 2 })
	for _, user := range []string{"ada", "bob", "cid"} {
		c := s.dial()
		c.sends(s.head(uuid.UUID{6: 0x70}, user, "Content-Length: 0\r\n"))
		_ = c.receives()
	}
	require.EqualValues(t, 1, s.server.connections.Load().Evicted())
	require.Equal(t, 2, s.server.connections.Load().Open())
}

// openStub runs a server without Redis and Postgres, where the names of buyers decide.
func openStub(t *testing.T, change func(*Config)) *shop {
	t.Helper()
	s := prepareStub(t, change)
	s.run()
	return s
}

// prepareStub makes the server without listening.
func prepareStub(t *testing.T, change func(*Config)) *shop {
	t.Helper()
	config := Config{
		Addr: "127.0.0.1:0", Reservations: stubReservations{}, Sales: stubSales{}, Orders: stubOrders{},
		Postgres: stubOrders{}, Auth: AuthHeader, ReceiptSecret: "a secret that is the same for both",
		Logger: slog.New(slog.DiscardHandler),
	}
	change(&config)
	server, err := New(config)
	require.NoError(t, err)
	t.Cleanup(server.Close)
	return &shop{t: t, server: server}
}

// answerTo returns the answer to a purchase on a connection of its own, without its date.
func (s *shop) answerTo(t *testing.T, header, body string) string {
	t.Helper()
	if header != "" {
		header += "\r\n"
	}
	c := s.dial()
	c.sends(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: shop\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s",
		ordersPath(uuid.UUID{6: 0x70}), header, len(body), body))
	r := c.receives()
	require.Len(t, r.header["Date"], 1)
	delete(r.header, "Date")
	return fmt.Sprint(r.status, r.header, r.closes, r.body)
}

// decidedByName has the verdict for each buyer; others have reserved.
var decidedByName = map[string]reservation.Verdict{
	"ada": reservation.Reserved, "bob": reservation.SoldOut, "cid": reservation.AlreadyPurchased,
	"dan": reservation.Paused, "eve": reservation.Replayed, "gus": reservation.OrderEnded, "fay": "",
}

// stubReservations decide by the name of the buyer, always in the same way. They tell entered of the buyer "held", and
// decide no such purchase before goOn.
type stubReservations struct {
	Reservations
	entered, goOn chan struct{}
}

func (stubReservations) Writable(context.Context) error { return nil }

func (s stubReservations) Reserve(_ context.Context, r reservation.Request) (reservation.Answer, error) {
	switch r.User {
	case "panics":
		panic("on purpose")
	case "aborts":
		panic(http.ErrAbortHandler)
	case "held":
		close(s.entered)
		<-s.goOn
	}
	verdict, known := decidedByName[r.User]
	switch {
	case !known:
		verdict = reservation.Reserved
	case verdict == "":
		return reservation.Answer{}, reservation.ErrOutcomeUnknown
	}
	return reservation.Answer{Verdict: verdict, Status: order.StatusCancelled, Reservation: order.Reservation{
		OrderID:  uuid.NewSHA1(r.Sale, fmt.Append(nil, r.User, " ", r.IdempotencyKey)),
		Quantity: r.Quantity, Epoch: 1, Sequence: 7, ReservedAt: time.UnixMilli(1_700_000_000_123),
	}}, nil
}

// stubOrders are a Postgres without orders.
type stubOrders struct{ Orders }

func (stubOrders) Ping(context.Context) error                                     { return nil }
func (stubOrders) FindOrders(context.Context, []uuid.UUID) ([]order.Order, error) { return nil, nil }

// stubSales are no sales.
type stubSales struct{ Sales }

func (stubSales) Followed(context.Context, []uuid.UUID, int) ([]uuid.UUID, error) {
	return nil, errors.New("there is no Redis")
}

func (stubSales) CountSales(context.Context, []uuid.UUID) ([]catalog.CountResult, error) {
	return nil, errors.New("there is no Redis")
}
