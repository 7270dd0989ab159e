package ingress

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestUnknownRoutesAndMethods(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	for _, path := range []string{
		"/", "/v1", "/v2/sales", "/v1/sales/x/nothing", "/v1/orders/x/nothing", "/v1/admin", "/v1/admin/orders/x/y",
		"/favicon.ico", "//", "/v1/%73ales/x/y/z",
	} {
		s.get(path).isProblem(http.StatusNotFound, "not-found")
	}
	// A missing id, for example from an empty variable of a client, is no route; it is not an invalid id.
	for _, path := range []string{
		"/v1/sales/", "/v1/sales//orders", "/v1/sales//events", "/v1/sales//pause", "/v1/sales//restock", "/v1/orders/",
		"/v1/orders//pay", "/v1/orders//cancel",
		"/v1/orders//events", "/v1/orders//events/ticket", "/v1/sales//events/ticket", "/v1/admin/orders/",
		"/v1/admin/orders//cancel", "/v1/admin/sales//history", "/problems/",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
			for _, headers := range [][]reqHeader{nil, {as("ada"), operator}} {
				r := s.ask(method, path, nil, headers...)
				r.isProblem(http.StatusNotFound, "not-found")
				require.Empty(t, r.header.Get("Allow"), path)
			}
		}
	}
	for path, allow := range map[string]string{
		"/v1/sales":                  "OPTIONS, GET, HEAD, POST",
		"/v1/sales/x":                "OPTIONS, GET, HEAD",
		"/v1/sales/x/orders":         "OPTIONS, POST",
		"/v1/sales/x/pause":          "OPTIONS, POST",
		"/v1/sales/x/resume":         "OPTIONS, POST",
		"/v1/sales/x/end":            "OPTIONS, POST",
		"/v1/sales/x/restock":        "OPTIONS, POST",
		"/v1/orders":                 "OPTIONS, GET, HEAD",
		"/v1/orders/x":               "OPTIONS, GET, HEAD",
		"/v1/orders/x/pay":           "OPTIONS, POST",
		"/v1/orders/x/cancel":        "OPTIONS, POST",
		"/v1/orders/x/events/ticket": "OPTIONS, POST",
		"/v1/sales/x/events/ticket":  "OPTIONS, POST",
		"/livez":                     "OPTIONS, GET, HEAD",
		"/readyz":                    "OPTIONS, GET, HEAD",
		"/metrics":                   "OPTIONS, GET, HEAD",
		"/v1/admin/orders":           "OPTIONS, GET, HEAD",
		"/v1/admin/orders/x":         "OPTIONS, GET, HEAD",
		"/v1/admin/orders/x/cancel":  "OPTIONS, POST",
		"/v1/admin/sales/x/history":  "OPTIONS, GET, HEAD",
		"/openapi.yaml":              "OPTIONS, GET, HEAD",
		"/openapi.json":              "OPTIONS, GET, HEAD",
		"/docs":                      "OPTIONS, GET, HEAD",
		"/problems":                  "OPTIONS, GET, HEAD",
		"/problems/x":                "OPTIONS, GET, HEAD",
	} {
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

func TestHeadIsGetWithoutBody(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 1})
	for _, path := range []string{"/livez", "/readyz", "/v1/sales", "/v1/sales/" + sale.String()} {
		get, head := s.get(path), s.ask(http.MethodHead, path, nil)
		require.Equal(t, http.StatusOK, head.status, path)
		require.Empty(t, head.body)
		require.Equal(t, get.header.Get("Content-Type"), head.header.Get("Content-Type"))
		require.Equal(t, get.header.Get("Cache-Control"), head.header.Get("Cache-Control"))
	}
	require.Equal(t, http.StatusNotFound, s.ask(http.MethodHead, "/v1/sales/x", nil).status)
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
			_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		}()
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, name)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err, name)
		require.NoError(t, res.Body.Close())
		reply{t, res.StatusCode, res.Header, string(body)}.isProblem(test.status, test.slug)
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
	chunk := fmt.Sprintf("%x\r\n%s\r\n", maxBodyBytes+1, strings.Repeat(" ", maxBodyBytes+1))

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
		in := bufio.NewReader(conn)
		asks := expect
		if strings.Contains(test.length, "Expect") {
			asks = ""
		}
		_, err := io.WriteString(conn, s.head(sale, "ada", asks, test.length))
		require.NoError(t, err)
		res, err := http.ReadResponse(in, nil)
		require.NoError(t, err, name)
		if test.continues {
			require.Equal(t, http.StatusContinue, res.StatusCode, name)
			_, err = io.WriteString(conn, test.body)
			require.NoError(t, err)
			res, err = http.ReadResponse(in, nil)
			require.NoError(t, err, name)
		}
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err, name)
		require.NoError(t, res.Body.Close())
		require.Equal(t, test.status, res.StatusCode, name)
		if test.status == http.StatusRequestEntityTooLarge {
			reply{t, res.StatusCode, res.Header, string(body)}.isProblem(test.status, "body-too-large")
			require.True(t, res.Close, "%s: the connection is kept for the rest of the body", name)
		}
	}
	require.EqualValues(t, 1, s.stock(sale).Orders)
}

// Purchases that wait for Redis fill the server.
func TestRequestsInFlightAreBounded(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, servers{own.URL, testkit.DatabaseURL(t), testkit.Keys(t)}, func(c *Config) { c.MaxInFlight = 2 })
	sale := s.sale(reservation.Terms{Stock: 10})
	paid, _ := s.confirm(s.sale(reservation.Terms{Stock: 1, PaymentWindow: time.Hour}), "eve")
	s.buy(sale, "", as("warm-up")).is(http.StatusAccepted)
	require.NoError(t, syscall.Kill(own.Pid(), syscall.SIGSTOP))
	goOn := sync.OnceFunc(func() { require.NoError(t, syscall.Kill(own.Pid(), syscall.SIGCONT)) })
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
	slow := make([]net.Conn, 5)
	for i := range slow {
		slow[i] = s.dial()
		_, err := io.WriteString(slow[i], s.head(sale, fmt.Sprint("slow-", i), "Content-Length: 2\r\n")+"{")
		require.NoError(t, err)
	}
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
	_, err := io.WriteString(slow[0], "}")
	require.NoError(t, err)
	res, err := http.ReadResponse(bufio.NewReader(slow[0]), nil)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusAccepted, res.StatusCode)
}

// A kind that is full takes no slot from another.
func TestEachKindOfRequestHasSlots(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.MaxInFlight = 2 })
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	path, id := s.confirm(sale, "eve")
	s.get(path, as("eve")).is(http.StatusOK) // from now on its sale is known
	unlock := s.lock("sales")

	var hanging sync.WaitGroup
	hanging.Go(func() { s.get("/v1/sales").is(http.StatusOK) })
	testkit.Eventually(t, 30*time.Second, "a request hangs in Postgres", func() bool {
		return s.server.inFlight.sales.taken.Load() == 1
	})
	p := s.get("/v1/sales").isProblem(http.StatusServiceUnavailable, "overloaded")
	require.NotContains(t, p["detail"], "reserved")
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
	s.pay(path, "r-1", as("eve")).is(http.StatusOK)
	unlock()
	hanging.Wait()

	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	hanging.Go(func() { s.pay(path, "r-1", as("eve")).is(http.StatusOK) })
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
	s.server.handle(
		http.MethodGet, "/panics", s.server.inFlight.operators.admit(func(echo.Context) error { panic("the secret is 42") }),
	)
	s.server.handle(http.MethodGet, "/panics-late", func(c echo.Context) error {
		c.Response().WriteHeader(http.StatusOK)
		_, _ = c.Response().Write([]byte("half"))
		panic("too late")
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
