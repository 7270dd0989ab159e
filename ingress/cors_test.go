package ingress

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/reservation"
)

const shopOrigin = "https://shop.example"

func fromOrigin(origin string) reqHeader { return reqHeader{"Origin", origin} }

func withOrigins(origins ...string) func(*Config) {
	return func(c *Config) { c.CORSOrigins = origins }
}

func (s *shop) preflight(path, method, origin string) reply {
	s.t.Helper()
	return s.ask(http.MethodOptions, path, nil, fromOrigin(origin), reqHeader{"Access-Control-Request-Method", method},
		reqHeader{"Access-Control-Request-Headers", "authorization,content-type,idempotency-key"})
}

// corsHeaders returns the headers of CORS in an answer, and Vary.
func corsHeaders(r reply) map[string]string {
	found := map[string]string{}
	for name := range r.header {
		if strings.HasPrefix(name, "Access-Control-") || name == "Vary" {
			found[strings.TrimPrefix(name, "Access-Control-")] = strings.Join(r.header[name], "; ")
		}
	}
	return found
}

var (
	readable = map[string]string{"Allow-Origin": shopOrigin, "Expose-Headers": exposedHeaders, "Vary": "Origin"}
	varies   = map[string]string{"Vary": "Origin"}
	noCORS   = map[string]string{}
)

func TestCORSIsOffByDefault(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	require.Equal(t, noCORS, corsHeaders(s.get("/v1/sales", fromOrigin(shopOrigin))))
	require.Equal(t, noCORS, corsHeaders(s.preflight("/v1/orders", http.MethodGet, shopOrigin)))
	sale := s.sale(reservation.Terms{Stock: 1})
	require.Equal(t, noCORS, corsHeaders(s.buy(sale, "", as("ada"), fromOrigin(shopOrigin))))
}

func TestCORSAllowsScriptsOfListedOrigins(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOrigins("http://localhost:3000", shopOrigin))
	sale := s.sale(reservation.Terms{Stock: 1})
	path := "/v1/sales/" + sale.String()
	accepted := s.buy(sale, "", as("ada"), fromOrigin(shopOrigin))
	accepted.is(http.StatusAccepted)
	require.Equal(t, readable, corsHeaders(accepted))

	for what, r := range map[string]reply{
		"sold out":      s.buy(sale, "", as("bob"), fromOrigin(shopOrigin)),
		"unauthorized":  s.buy(sale, "", fromOrigin(shopOrigin)),
		"a sale":        s.get(path, fromOrigin(shopOrigin)),
		"not modified":  s.get(path, fromOrigin(shopOrigin), reqHeader{"If-None-Match", "*"}),
		"an order":      s.get(accepted.header.Get("Location"), as("ada"), fromOrigin(shopOrigin)),
		"not found":     s.get("/v1/orders/x", as("ada"), fromOrigin(shopOrigin)),
		"no route":      s.get("/nowhere", fromOrigin(shopOrigin)),
		"another verb":  s.ask(http.MethodDelete, "/v1/orders/x", nil, fromOrigin(shopOrigin)),
		"wait":          s.buy(sale, "", as("bob"), fromOrigin(shopOrigin), reqHeader{"Prefer", "wait=1"}),
		"too large":     s.buy(sale, strings.Repeat(" ", accept.MaxBodyBytes+1), as("ada"), fromOrigin(shopOrigin)),
		"missing id":    s.get("/v1/orders//events", fromOrigin(shopOrigin)),
		"not JSON":      s.ask("POST", ordersPath(sale), strings.NewReader("a=b"), as("ada"), fromOrigin(shopOrigin)),
		"head of sales": s.ask(http.MethodHead, "/v1/sales", nil, fromOrigin(shopOrigin)),
	} {
		require.Equal(t, readable, corsHeaders(r), "%s: %d %s", what, r.status, r.body)
	}
	for _, headers := range [][]reqHeader{
		nil,
		{fromOrigin("https://evil.example")},
		{fromOrigin("null")},
		{fromOrigin("")},
		{fromOrigin("https://shop.example:444")},
		{fromOrigin("http://shop.example")},
		{fromOrigin("HTTPS://shop.example")},
		{fromOrigin("https://shop.example/")},
		{fromOrigin(shopOrigin), fromOrigin(shopOrigin)},
		{fromOrigin("https://shop.example.evil")},
		{fromOrigin("https://www.shop.example")},
	} {
		require.Equal(t, varies, corsHeaders(s.get(path, headers...)), "%v", headers)
		require.Equal(t, varies, corsHeaders(s.buy(sale, "", append(headers, as("bob"))...)), "%v", headers)
	}
}

func TestCORSPreflights(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOrigins(shopOrigin), func(c *Config) { c.AuthHeader = "x-buyer" })
	orders := ordersPath(uuid.New())
	for path, method := range map[string]string{
		orders: http.MethodPost, "/v1/orders": http.MethodGet, "/v1/orders/x/pay": http.MethodPost,
		"/v1/sales": http.MethodGet, "/v1/orders/x/events/ticket": http.MethodPost, orders[:len(orders)-len("/orders")] +
			"/events/ticket": http.MethodPost, "/v1/sales/x/draw/beacon": http.MethodPost,
	} {
		r := s.preflight(path, method, shopOrigin)
		require.Equal(t, http.StatusNoContent, r.status)
		require.Empty(t, r.body)
		require.Equal(t, map[string]string{
			"Allow-Origin": shopOrigin, "Vary": "Origin", "Allow-Methods": "GET, HEAD, POST", "Max-Age": "7200",
			"Allow-Headers":  "Authorization, Content-Type, Idempotency-Key, Last-Event-ID, Prefer, X-Buyer",
			"Expose-Headers": exposedHeaders,
		}, corsHeaders(r), path)
		require.Equal(t, varies, corsHeaders(s.preflight(path, method, "https://evil.example")), path)
		plain := s.ask(http.MethodOptions, path, nil, fromOrigin(shopOrigin))
		require.Equal(t, readable, corsHeaders(plain), "not a preflight")
		require.NotEmpty(t, plain.header.Get("Allow"))
	}
	s.server.stopping.Store(true)
	conn := s.dial()
	conn.sends("OPTIONS /v1/orders HTTP/1.1\r\nHost: shop\r\nOrigin: " + shopOrigin +
		"\r\nAccess-Control-Request-Method: GET\r\n\r\n")
	r := conn.receives()
	require.True(t, r.closes, "a stopping server keeps the connection")
	require.NotEmpty(t, r.header.Get("Access-Control-Allow-Methods"))
	require.NotContains(t, newCORS(Config{Auth: AuthJWT, CORSOrigins: []string{"*"}}).headers[0], "X-User-ID")
}

// An operator's token must not be used by a page, and metrics are not for one.
func TestCORSIsNotForOperators(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOrigins(anyOrigin))
	sale := s.sale(reservation.Terms{Stock: 1})
	path := "/v1/sales/" + sale.String()
	for _, call := range []string{"", "/pause", "/resume", "/end", "/restock", "/rename", "/draw"} {
		target := path + call
		if call == "" {
			target = "/v1/sales"
		}
		require.Equal(t, noCORS, corsHeaders(s.preflight(target, http.MethodPost, shopOrigin)), target)
		require.Equal(t, noCORS, corsHeaders(s.post(target, "{}", operator, fromOrigin(shopOrigin))), target)
	}
	require.NotContains(t, corsHeaders(s.get("/metrics", fromOrigin(shopOrigin))), "Allow-Origin")
	require.Equal(t, noCORS, corsHeaders(s.get("/v1/admin/orders", fromOrigin(shopOrigin))))
	require.Equal(t, noCORS, corsHeaders(s.preflight("/v1/admin/orders/x", http.MethodGet, shopOrigin)))
	// Every route is for operators or for browsers, also those that come later.
	for _, r := range s.server.router.routes {
		private := r.admission.proof == operatorsToken || r.admission.proof == signatureOfEvent || r.path == "/metrics"
		require.Equal(t, !private, s.server.router.cors.forBrowsers(r.method, r.path), r.path)
	}
	for what, r := range map[string]reply{
		"with an origin": s.get("/v1/sales", fromOrigin("https://a.example")), "without one": s.get("/v1/sales"),
		"a purchase": s.buy(sale, "", as("ada")),
	} {
		require.Equal(t, map[string]string{"Allow-Origin": "*", "Expose-Headers": exposedHeaders}, corsHeaders(r), what)
	}
}

func TestParseOrigins(t *testing.T) {
	t.Parallel()
	origins, err := ParseOrigins("https://shop.example, http://localhost:3000,http://[2001:db8::1]:8080,")
	require.NoError(t, err)
	require.Equal(t, []string{"https://shop.example", "http://localhost:3000", "http://[2001:db8::1]:8080"}, origins)
	origins, err = ParseOrigins("*")
	require.NoError(t, err)
	require.Equal(t, []string{"*"}, origins)
	for wrong, complaint := range map[string]string{
		"shop.example":             "want http:// or https://",
		"ftp://shop.example":       "want http:// or https://",
		"https://":                 "want http:// or https://",
		"https://:8080":            "want http:// or https://",
		"null":                     "want http:// or https://",
		"https://shop.example/":    "not even a slash",
		"https://shop.example?":    "not even a slash",
		"https://shop.example#":    "not even a slash",
		"https://a@shop.example":   "not even a slash",
		"https://*.shop.example":   "no wildcards",
		"*,https://shop.example":   "must be the only one",
		"https://Shop.example":     "lower case",
		"HTTPS://shop.example":     "lower case",
		"https://bücher.example":   "xn--",
		"https://shop.example:":    "the port is missing",
		"https://shop.example:x":   "want http:// or https://",
		"https://shop.example:443": "leave the usual port out",
		"http://shop.example:80":   "leave the usual port out",
		"https://a b":              "want http:// or https://",
	} {
		_, err := ParseOrigins(wrong)
		require.ErrorContains(t, err, complaint, wrong)
	}
}
