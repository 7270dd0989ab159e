package ingress

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// parameter is a parameter in the path of a route.
var parameter = regexp.MustCompile(`:(\w+)`)

func TestUnknownRoutesAndMethods(t *testing.T) {
	t.Parallel()
	_, stripe := withStripe(t, stripeSecret)
	s := openShop(t, stripe)
	for _, path := range []string{
		"/", "/v1", "/v2/sales", "/v1/sales/x/nothing", "/v1/orders/x/nothing", "/v1/admin", "/v1/admin/orders/x/y",
		"/favicon.ico", "//", "/v1/%73ales/x/y/z",
	} {
		s.get(path).isProblem(http.StatusNotFound, "not-found")
	}
	allowed := map[string][]string{}
	for _, r := range s.server.router.routes {
		allowed[r.path] = append(allowed[r.path], r.method)
		if r.isLook() {
			allowed[r.path] = append(allowed[r.path], http.MethodHead)
		}
		// A missing id, for example from an empty variable of a client, is no route; it is not an invalid id.
		path := parameter.ReplaceAllString(r.path, "")
		if path == r.path {
			continue
		}
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
			for _, headers := range [][]reqHeader{nil, {as("ada"), operator}} {
				answer := s.ask(method, path, nil, headers...)
				answer.isProblem(http.StatusNotFound, "not-found")
				require.Empty(t, answer.header.Get("Allow"), path)
			}
		}
	}
	require.ElementsMatch(t, []string{"GET", "HEAD", "POST"}, allowed["/v1/sales"])
	require.ElementsMatch(t, []string{"GET"}, allowed["/v1/sales/:sale/events"])
	for path, methods := range allowed {
		path = parameter.ReplaceAllString(path, "x")
		slices.Sort(methods)
		allow := strings.Join(append([]string{http.MethodOptions}, methods...), ", ")
		for _, method := range []string{
			http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		} {
			if strings.Contains(allow, method) {
				continue
			}
			r := s.ask(method, path, nil)
			require.Equal(t, http.StatusMethodNotAllowed, r.status, "%s %s", method, path)
			require.Equal(t, allow, r.header.Get("Allow"), "%s %s", method, path)
			if method != http.MethodHead {
				r.isProblem(http.StatusMethodNotAllowed, "method-not-allowed")
			}
		}
		options := s.ask(http.MethodOptions, path, nil)
		require.Equal(t, http.StatusNoContent, options.status)
		require.Equal(t, allow, options.header.Get("Allow"), path)
	}
}

// Each call reads its body in the same way: one JSON object, of whose members each is known, spelled exactly and sent
// once.
func TestBodiesAreReadStrictly(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	id := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, _ := s.confirm(id, "ada")
	before, stock := s.get(path, as("ada")).body, s.stock(id)
	for call, valid := range map[string]string{
		ordersPath(id): `{"quantity":1}`, path + "/pay": `{"reference":"r-1"}`, path + "/cancel": "{}",
		adminPath(path) + "/cancel": `{"reason":"r"}`, "/v1/sales": `{"name":"x","stock":1}`,
		"/v1/sales/" + id.String() + "/restock": `{"units":1}`, path + "/events/ticket": "{}",
		"/v1/sales/" + id.String() + "/rename": `{"name":"y"}`,
	} {
		caller, most := as("ada"), accept.MaxBodyBytes
		if call == "/v1/sales" || strings.HasSuffix(call, "rename") {
			most = saleBodyMax
		}
		if strings.Contains(call, "admin") || strings.HasPrefix(call, "/v1/sales") && call != ordersPath(id) {
			caller = operator
		}
		malformed := map[string]string{
			"null": "object", `"x"`: "object", "[]": "object", "1": "object", " ": "object", "\ufeff{}": "object",
			"{": "JSON", valid + " x": "JSON", valid + "{}": "JSON", "{\"\xff\":1}": "JSON", "{\x00}": "JSON",
			`{"new":1}`: "new", `{"` + strings.Repeat("y", 1000) + `":1}`: "yyy…",
		}
		if valid != "{}" {
			if call != ordersPath(id) && !strings.HasSuffix(call, "restock") {
				malformed[""] = "object"
			}
			malformed[valid[:len(valid)-1]] = "JSON"
			malformed[valid[:len(valid)-1]+","+valid[1:]] = "twice"
			malformed[`{"`+strings.ToUpper(valid[2:3])+valid[3:]] = strings.ToUpper(valid[2:3])
		}
		for body, detail := range malformed {
			p := s.post(call, body, caller).isProblem(http.StatusBadRequest, "invalid-request")
			require.Contains(t, p["detail"], detail, "%s %s", call, body)
		}
		s.post(call, valid+strings.Repeat(" ", most+1-len(valid)), caller).
			isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
		s.ask(http.MethodPost, call, strings.NewReader("quantity=1"), caller).
			isProblem(http.StatusUnsupportedMediaType, "unsupported-media-type")
	}
	p := s.post(path+"/pay", "{}", as("ada")).isProblem(http.StatusBadRequest, "invalid-request")
	require.Contains(t, p["detail"], "reference")
	require.Equal(t, before, s.get(path, as("ada")).body)
	require.Equal(t, stock, s.stock(id))
	require.Len(t, s.get("/v1/sales").is(http.StatusOK)["sales"], 1)
}

// No HTTP client would send these.
func TestMalformedBodiesAreRejected(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	before := s.stock(sale)
	megabyte := strings.Repeat(fmt.Sprintf("1000\r\n%s\r\n", strings.Repeat(" ", 4096)), 256)

	for name, test := range map[string]struct {
		request string
		status  int
		slug    string
	}{
		"1 MB in chunks": {
			s.head(sale, "ada", "Transfer-Encoding: chunked\r\n") + megabyte + "0\r\n\r\n", 413, "body-too-large",
		},
		"chunks that break off": {
			s.head(sale, "ada", "Transfer-Encoding: chunked\r\n") + "e\r\n{\"quantity\":1}\r\n", 400, "invalid-request",
		},
		"chunks that are none": {
			s.head(sale, "ada", "Transfer-Encoding: chunked\r\n") + "zz\r\n{\"quantity\":1}\r\n", 400, "invalid-request",
		},
		"a body that breaks off": {
			s.head(sale, "ada", "Content-Length: 100\r\n") + `{"quantity":1}`, 400, "invalid-request",
		},
		"a length beyond the body": {s.head(sale, "ada", "Content-Length: 9999999999\r\n"), 413, "body-too-large"},
		"control character in key": {
			s.head(sale, "ada", "Idempotency-Key: a\tb\r\n", "Content-Length: 0\r\n"), 400, "invalid-request",
		},
		"control character in id": {s.head(sale, "a\tb", "Content-Length: 0\r\n"), 400, "invalid-request"},
	} {
		conn := s.dial()
		go func() {
			_, _ = io.WriteString(conn, test.request)
			// The request ends here, even if its head announced more.
			_ = conn.Conn.(*net.TCPConn).CloseWrite()
		}()
		conn.receives().isProblem(test.status, test.slug)
		require.Equal(t, before, s.stock(sale), name)
	}
}

// A body that is too large is refused before it is sent.
func TestExpectContinue(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	const expect = "Expect: 100-continue\r\n"
	const first, last = `{"quantity":`, `1}`
	chunk := fmt.Sprintf("%x\r\n%s\r\n", accept.MaxBodyBytes+1, strings.Repeat(" ", accept.MaxBodyBytes+1))

	for name, test := range map[string]struct {
		length, body string
		continues    bool
		status       int
	}{
		"a length over the limit":  {"Content-Length: 4097\r\n", "", false, http.StatusRequestEntityTooLarge},
		"chunks over the limit":    {"Transfer-Encoding: chunked\r\n", chunk, true, http.StatusRequestEntityTooLarge},
		"a body within the limit":  {"Content-Length: 14\r\n", first + last, true, http.StatusAccepted},
		"an expectation of others": {"Content-Length: 14\r\nExpect: tea\r\n", "", false, http.StatusExpectationFailed},
	} {
		conn := s.dial()
		asks := expect
		if strings.Contains(test.length, "Expect") {
			asks = ""
		}
		conn.sends(s.head(sale, "ada", asks, test.length))
		if test.continues {
			conn.receivesContinue()
			conn.sends(test.body)
		}
		r := conn.receives()
		require.Equal(t, test.status, r.status, name)
		if test.status == http.StatusRequestEntityTooLarge {
			r.isProblem(test.status, "body-too-large")
			require.True(t, r.closes, "%s: the connection is kept for the rest of the body", name)
		}
	}
	require.EqualValues(t, 1, s.stock(sale).Orders)
}

// Purchases that wait for Redis fill the server.
func TestRequestsInFlightAreBounded(t *testing.T) {
	t.Parallel()
	var held heldPurchases
	s := openShop(t, func(c *Config) {
		c.MaxInFlight, held.Reservations = 2, c.Reservations
		c.Reservations = &held
	})
	sale := s.sale(reservation.Terms{Stock: 10})
	paid, _ := s.confirm(s.sale(reservation.Terms{Stock: 1, PaymentWindow: time.Hour}), "eve")
	s.buy(sale, "", as("warm-up")).is(http.StatusAccepted)
	held.gate.Lock()
	goOn := sync.OnceFunc(held.gate.Unlock)
	defer goOn()

	var waiting sync.WaitGroup
	for i := range 2 {
		waiting.Go(func() { s.buy(sale, "", as(fmt.Sprint("waiting-", i))).is(http.StatusAccepted) })
	}
	testkit.Eventually(t, 30*time.Second, "both purchases are in flight", func() bool {
		return s.server.inFlight.taken() == 2
	})

	r := s.buy(sale, "", as("ada"))
	r.isProblem(http.StatusServiceUnavailable, "overloaded")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Contains(t, r.json()["detail"], "Nothing was reserved")
	// Purchases take no slots from buyers with an order.
	s.pay(paid, "r-1", as("eve")).is(http.StatusOK)
	require.Equal(t, "paid", s.get(paid, as("eve")).is(http.StatusOK)["status"])
	require.Contains(t, s.get("/metrics").body, "stampede_http_requests_in_flight 2\n")
	// A refused purchase is counted and timed immediately.
	require.Contains(t, s.get("/metrics").body, `stampede_purchases_total{verdict="overloaded"} 1`+"\n")
	require.Contains(t, s.get("/metrics").body, `stampede_purchase_duration_seconds_count{outcome="failed"} 1`+"\n")
	s.get("/livez").is(http.StatusOK)

	goOn()
	waiting.Wait()
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
}

func TestSlowBodiesTakeNoSlot(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 2 })
	sale := s.sale(reservation.Terms{Stock: 10})
	slow := make([]caller, 5)
	for i := range slow {
		slow[i] = s.dial()
		slow[i].sends(s.head(sale, fmt.Sprint("slow-", i), "Content-Length: 2\r\n") + "{")
	}
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
	slow[0].sends("}")
	slow[0].receives().is(http.StatusAccepted)
}

// The keys of a stranger's token may have to be fetched from a provider that does not answer.
func TestStrangersTakeNoSlot(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	var isSlow atomic.Bool
	asked := make(chan struct{}, 1)
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isSlow.Load() {
			asked <- struct{}{}
			<-r.Context().Done()
			return
		}
		i.Config.Handler.ServeHTTP(w, r)
	}))
	t.Cleanup(provider.Close)
	s := openShop(t, withIssuer(i), func(c *Config) { c.JWKSURL, c.MaxInFlight = provider.URL, 2 })
	buyer := bearing(sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims()))
	s.get("/v1/orders", buyer).is(http.StatusOK)
	isSlow.Store(true)
	unknown := sign(t, jwt.SigningMethodRS256, i.rsa, "unknown", tokenClaims())
	stranger := s.dial()
	stranger.sends("GET /v1/orders HTTP/1.1\r\nHost: shop\r\nAuthorization: Bearer " + unknown + "\r\n\r\n")
	<-asked
	s.get("/v1/orders", buyer).is(http.StatusOK)
	stranger.receives().isProblem(http.StatusUnauthorized, "unauthorized")
}

// A kind that is full takes no slot from another.
func TestEachKindOfRequestHasSlots(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 2 })
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id := s.confirm(sale, "eve")
	unlock := s.lock("sales")

	var hanging sync.WaitGroup
	hanging.Go(func() { s.get("/v1/sales").is(http.StatusOK) })
	testkit.Eventually(t, 30*time.Second, "a request hangs in Postgres", func() bool {
		return s.server.inFlight.sales.taken.Load() == 1
	})
	p := s.get("/v1/sales").isProblem(http.StatusServiceUnavailable, "overloaded")
	require.NotContains(t, p["detail"], "reserved")
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
	s.get("/v1/orders/x", as("eve")).isProblem(http.StatusNotFound, "order-not-found") // it takes a slot of orders
	unlock()
	hanging.Wait()

	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	hanging.Go(func() {
		r := s.pay(path, "r-1", as("eve"))
		for r.status == http.StatusServiceUnavailable { // a slow machine holds its order for longer than it waits
			r = s.pay(path, "r-1", as("eve"))
		}
		r.is(http.StatusOK)
	})
	testkit.Eventually(t, 30*time.Second, "a payment waits for its order", func() bool {
		return s.server.inFlight.orders.taken.Load() == 1
	})
	for action, body := range map[string]string{"/pay": `{"reference":"r"}`, "/cancel": ""} {
		p := s.post(orderPath(order.NewOrderID(sale))+action, body, as("ada")).
			isProblem(http.StatusServiceUnavailable, "overloaded")
		require.Contains(t, p["detail"], "Nothing was done")
	}
	s.buy(sale, "", as("bob")).is(http.StatusAccepted)
	s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator).is(http.StatusOK)
	require.NoError(t, tx.Rollback(t.Context()))
	hanging.Wait()
}

func TestPanicIsAnsweredAndLogged(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	s := openShop(t, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	s.server.router.add(route{
		method: http.MethodGet, path: "/panics", admission: admission{slot: &s.server.inFlight.operators}, isOn: true,
		serve: func(echo.Context, string) error { panic("the secret is 42") },
	})
	s.server.router.add(route{
		method: http.MethodGet, path: "/panics-late", isOn: true,
		serve: func(c echo.Context, _ string) error {
			c.Response().WriteHeader(http.StatusOK)
			_, _ = c.Response().Write([]byte("half"))
			panic("too late")
		},
	})

	r := s.get("/panics")
	id := r.isProblem(http.StatusInternalServerError, "internal-error")["request_id"]
	require.NotContains(t, r.body, "secret")
	require.Contains(t, log.String(), "request_id="+id.(string))
	require.Contains(t, log.String(), "the secret is 42")
	require.Contains(t, log.String(), "TestPanicIsAnsweredAndLogged") // the stack
	require.Zero(t, s.server.inFlight.taken())
	require.Contains(t, s.get("/metrics").body, `stampede_http_requests_total{route="GET /panics",status="5xx"} 1`)

	res, err := http.Get(s.url + "/panics-late") //nolint:noctx // ends with the server
	if err == nil {
		_, err = io.ReadAll(res.Body)
		require.NoError(t, res.Body.Close())
	}
	require.Error(t, err, "a partial answer looked complete")
	s.get("/livez").is(http.StatusOK)
}

// syncBuffer is a log that can be read while it is written.
type syncBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func TestPreferredWait(t *testing.T) {
	t.Parallel()
	const none = -1
	for _, c := range []struct {
		headers []string
		seconds int
	}{
		{nil, none},
		{[]string{""}, none},
		{[]string{"wait=5"}, 5},
		{[]string{"wait=0"}, 0},
		{[]string{"wait=30"}, 30},
		{[]string{"wait=31"}, 30},
		{[]string{"wait=999"}, 30},
		{[]string{"wait=99999999999999999999999999"}, 30},
		{[]string{"wait=007"}, 7},
		{[]string{"WAIT=2"}, 2},
		{[]string{" wait = 2 "}, 2},
		{[]string{"\twait\t=\t2"}, 2},
		{[]string{`wait="12"`}, 12},
		{[]string{"respond-async, wait=2"}, 2},
		{[]string{"respond-async,wait=2,return=minimal"}, 2},
		{[]string{"respond-async", "wait=2"}, 2},
		{[]string{"wait=2; foo=bar, wait=9"}, 2},
		{[]string{"wait=2", "wait=9"}, 2},
		{[]string{`return="minimal, wait=9", wait=2`}, 2},
		{[]string{`x="\", wait=9", wait=2`}, 2},
		{[]string{`x="a;b=c"; wait=9, wait=2`}, 2},
		{[]string{"waiting=5"}, none},
		{[]string{"wait"}, none},
		{[]string{"wait="}, none},
		{[]string{`wait=""`}, none},
		{[]string{`wait="`}, none},
		{[]string{"wait=abc"}, none},
		{[]string{"wait=-1"}, none},
		{[]string{"wait=+1"}, none},
		{[]string{"wait=1.5"}, none},
		{[]string{"wait=1e1"}, none},
		{[]string{"wait=2 5"}, none},
		{[]string{"wait=abc, wait=5"}, none}, // only the first one counts
		{[]string{"return=minimal; wait=5"}, none},
		{[]string{`x="wait=5`}, none},
		{[]string{",,;=,"}, none},
	} {
		wait, ok := preferredWait(c.headers)
		if c.seconds == none {
			require.False(t, ok, "%q", c.headers)
			continue
		}
		require.True(t, ok, "%q", c.headers)
		require.Equal(t, time.Duration(c.seconds)*time.Second, wait, "%q", c.headers)
	}
}
