package ingress

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// rotating is an identity provider that counts how often it is asked.
type rotating struct {
	*issuer
	asked atomic.Int64
	// held, unless nil, keeps its answers back until it is closed.
	held atomic.Pointer[chan struct{}]
}

func newRotating(t *testing.T) *rotating {
	t.Helper()
	p := &rotating{issuer: newIssuer(t)}
	inner := p.Config.Handler
	p.Close()
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.asked.Add(1)
		if held := p.held.Load(); held != nil {
			<-*held
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(p.Close)
	return p
}

// rotate replaces both keys under the same kids.
func (p *rotating) rotate(t *testing.T) {
	t.Helper()
	next := newIssuer(t)
	p.rsa, p.ec = next.rsa, next.ec
	p.keys.Store(next.keys.Load())
}

var plainSaleID = uuid.UUID{6: 0x70}

func (s *shop) buysAt(status int, token string) {
	s.t.Helper()
	r := s.buy(plainSaleID, "{}", bearing(token))
	require.Equal(s.t, status, r.status, r.body)
}

// A provider that uses one kid for keys of two types, or puts keys for other uses into its set.
func TestAuthFindsKeysByKidAndType(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	keys := *i.keys.Load()
	keys[0]["kid"], keys[1]["kid"] = "same", "same"
	second, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	public, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	i.keys.Store(&[]map[string]string{
		keys[0],
		{"kty": "RSA", "kid": "same", "use": "tls", "n": "AQ", "e": "AQAB"},
		keys[1],
		{"kty": "RSA", "kid": "same", "n": encode(second.N.Bytes()), "e": "AQAB"},
		{"kty": "OKP", "kid": "ed", "crv": "Ed25519", "x": encode(public)},
		{"kty": "oct", "k": encode(make([]byte, 32))},
	})
	s := openStub(t, withIssuer(i))
	for _, kid := range []string{"same", ""} {
		s.buysAt(http.StatusAccepted, sign(t, jwt.SigningMethodRS256, i.rsa, kid, tokenClaims()))
		s.buysAt(http.StatusAccepted, sign(t, jwt.SigningMethodPS384, second, kid, tokenClaims()))
		s.buysAt(http.StatusAccepted, sign(t, jwt.SigningMethodES256, i.ec, kid, tokenClaims()))
	}
	s.buysAt(http.StatusAccepted, sign(t, jwt.SigningMethodEdDSA, private, "ed", tokenClaims()))
	s.buysAt(http.StatusUnauthorized, sign(t, jwt.SigningMethodEdDSA, private, "same", tokenClaims()))
	// The first key names its method, and the second is another.
	s.buysAt(http.StatusUnauthorized, sign(t, jwt.SigningMethodRS512, i.rsa, "same", tokenClaims()))
}

func TestAuthAsksAgainWhileNoKeyIsKnown(t *testing.T) {
	t.Parallel()
	p := newRotating(t)
	p.down.Store(true)
	s := openStub(t, withIssuer(p.issuer))
	token := bearing(sign(t, jwt.SigningMethodRS256, p.rsa, "", tokenClaims()))
	s.buy(plainSaleID, "{}", token).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	s.buy(plainSaleID, "{}", bearing("x")).isProblem(http.StatusUnauthorized, "unauthorized")
	detail := s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")["detail"]
	require.Contains(t, detail, "No key for the tokens of buyers is known")
	require.Contains(t, s.get("/metrics").body, `stampede_key_set_keys{state="usable"} 0`)
	testkit.Eventually(t, 30*time.Second, "the provider is asked again", func() bool { return p.asked.Load() > 2 })
	s.get("/readyz").isProblem(http.StatusServiceUnavailable, "not-ready")
	p.down.Store(false)
	testkit.Eventually(t, 30*time.Second, "it is ready", func() bool { return s.get("/readyz").status == http.StatusOK })
	s.buy(plainSaleID, "{}", token).is(http.StatusAccepted)
	require.Contains(t, s.get("/metrics").body, `stampede_key_set_keys{state="usable"} 2`)
	p.down.Store(true) // the keys are known
	require.Equal(t, http.StatusOK, s.get("/readyz").status)
}

// Providers rotate keys without another kid, or without any.
func TestAuthFetchesKeysForSignatureThatNoneVerifies(t *testing.T) {
	t.Parallel()
	for name, kid := range map[string]string{"same kid": "rsa", "no kid": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newRotating(t)
			s := openStub(t, withIssuer(p.issuer))
			old := sign(t, jwt.SigningMethodRS256, p.rsa, kid, tokenClaims())
			s.buysAt(http.StatusAccepted, old)
			p.rotate(t)
			s.buysAt(http.StatusAccepted, sign(t, jwt.SigningMethodRS256, p.rsa, kid, tokenClaims()))
			s.buysAt(http.StatusUnauthorized, old)
			require.EqualValues(t, 2, p.asked.Load())
		})
	}
}

// Tokens that anybody can forge have the provider asked once, and hold nothing that a buyer needs.
func TestForgedTokensKeepNobodyWaiting(t *testing.T) {
	t.Parallel()
	p := newRotating(t)
	s := openShop(t, withIssuer(p.issuer), func(c *Config) { c.MaxInFlight = 16 })
	valid := bearing(sign(t, jwt.SigningMethodRS256, p.rsa, "rsa", tokenClaims()))
	stranger, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	forged := bearing(sign(t, jwt.SigningMethodES256, stranger, "ec", tokenClaims()))
	for _, never := range []string{ // no key could verify these
		sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "ec", tokenClaims()), "a.b.c",
		signWith(t, jwt.SigningMethodES256, stranger, "crit", []string{"own"}),
	} {
		s.get("/v1/orders", bearing(never)).isProblem(http.StatusUnauthorized, "unauthorized")
	}
	require.EqualValues(t, 1, p.asked.Load())

	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	p.held.Store(&held)
	var asking sync.WaitGroup
	for range 8 { // there are two slots for orders
		asking.Go(func() { s.get("/v1/orders", forged).isProblem(http.StatusUnauthorized, "unauthorized") })
	}
	testkit.Eventually(t, 30*time.Second, "the provider is asked", func() bool { return p.asked.Load() == 2 })
	require.Zero(t, s.server.inFlight.taken())
	s.get("/v1/orders", valid).is(http.StatusOK)
	s.buy(s.sale(reservation.Terms{Stock: 1}), "", valid).is(http.StatusAccepted)
	release()
	asking.Wait()
	for range 20 {
		s.get("/v1/orders", forged).isProblem(http.StatusUnauthorized, "unauthorized")
	}
	require.EqualValues(t, 2, p.asked.Load())
}

// signWith signs a token with another member of its header.
func signWith(t *testing.T, method jwt.SigningMethod, key any, name string, value any) string {
	t.Helper()
	token := jwt.NewWithClaims(method, tokenClaims())
	token.Header[name] = value
	text, err := token.SignedString(key)
	require.NoError(t, err)
	return text
}

func TestAuthRefusesHeadersNotUnderstood(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	bySet, bySecret := openStub(t, withIssuer(i)), openStub(t, withJWT)
	for _, crit := range []any{
		[]string{"own"}, []string{"exp"}, []string{"b64"}, []string{}, "own", nil, 1, map[string]any{},
	} {
		for s, token := range map[*shop]string{
			bySet:    signWith(t, jwt.SigningMethodRS256, i.rsa, "crit", crit),
			bySecret: signWith(t, jwt.SigningMethodHS256, []byte(jwtSecret), "crit", crit),
		} {
			r := s.buy(plainSaleID, "{}", bearing(token))
			require.Contains(t, r.isProblem(http.StatusUnauthorized, "unauthorized")["detail"], "crit", crit)
			require.Contains(t, r.header.Get("WWW-Authenticate"), `error="invalid_token"`)
		}
	}
	for _, kid := range []any{1, nil, []string{"rsa"}} {
		bySet.buysAt(http.StatusUnauthorized, signWith(t, jwt.SigningMethodRS256, i.rsa, "kid", kid))
	}
	for _, other := range []string{"Crit", "CRIT", "own", "typ"} { // members that are not critical are ignored
		bySet.buysAt(http.StatusAccepted, signWith(t, jwt.SigningMethodRS256, i.rsa, other, "at+jwt"))
	}
}

// Tokens with many groups are long. The limit is the same for both readers, and what is above it gets a problem.
func TestHeadsAreLimited(t *testing.T) {
	t.Parallel()
	token := func(length int) string {
		c := tokenClaims(withClaim("groups", strings.Repeat("g", length*3/4)))
		return "Authorization: Bearer " + sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", c) + "\r\n"
	}
	buy := "POST " + ordersPath(plainSaleID) + " HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n"
	for _, plain := range []bool{true, false} {
		s := openStub(t, func(c *Config) { withJWT(c); c.PlainReader = plain })
		for _, first := range []string{"", buy + token(100) + "\r\n", "GET /livez HTTP/1.1\r\nHost: shop\r\n\r\n"} {
			for _, large := range []struct {
				text, slug string
				status     int
			}{
				{buy + token(accept.MaxHeadBytes+8<<10) + "\r\n", "head-too-large", http.StatusRequestHeaderFieldsTooLarge},
				{
					"GET /livez?" + strings.Repeat("q", accept.MaxHeadBytes+8<<10) + " HTTP/1.1\r\nHost: shop\r\n\r\n",
					"head-too-large", http.StatusRequestHeaderFieldsTooLarge,
				},
				{
					buy + strings.Repeat("X: y\r\n", (accept.MaxHeadBytes+8<<10)/6) + "\r\n",
					"head-too-large", http.StatusRequestHeaderFieldsTooLarge,
				},
				{"GET /livez HTTP/1.1\r\n\r\n", "invalid-request", http.StatusBadRequest},
				{"hello\r\n\r\n", "invalid-request", http.StatusBadRequest},
			} {
				c := s.dial()
				if first != "" {
					c.sends(first)
					require.Less(t, c.receives().status, 300)
				}
				c.sends(buy + token(10<<10) + "\r\n" + buy + token(accept.MaxHeadBytes-1<<10) + "\r\n" + large.text)
				c.receives().is(http.StatusAccepted)
				c.receives().is(http.StatusAccepted)
				refused := c.receives()
				refused.isProblem(large.status, large.slug)
				require.True(t, refused.closes)
				c.receivesEnd()
			}
		}
		c := s.dial() // net/http refuses this too, and no problem tells of it
		c.sends("POST /x HTTP/1.1\r\nHost: shop\r\nTransfer-Encoding: zip\r\n\r\n")
		require.Equal(t, http.StatusNotImplemented, c.receives().status)
	}
}

// encoding/json would take a claim for another one whose name differs in case.
func TestAuthComparesNamesOfClaimsExactly(t *testing.T) {
	t.Parallel()
	s := openStub(t, withJWT)
	signed := func(claims string) string {
		token := jwt.NewWithClaims(jwt.SigningMethodHS256, rawClaims{json.RawMessage(claims)})
		text, err := token.SignedString([]byte(jwtSecret))
		require.NoError(t, err)
		return text
	}
	const rest = `"exp":99999999999,"iss":"https://issuer.example","aud":"stampede"`
	s.buysAt(http.StatusAccepted, signed(`{"sub":"ada","Sub":"a b","SUB":7,`+rest+`}`))
	s.buysAt(http.StatusUnauthorized, signed(`{"SUB":"ada",`+rest+`}`))
	s.buysAt(http.StatusUnauthorized, signed(`{"sub":"ada",`+strings.ToUpper(rest)+`}`))
	s.buysAt(http.StatusAccepted, signed(`{"sub":"ada","name":"\ud83d","groups":[1,{"a":1,"a":2}],`+rest+`}`))
}

// rawClaims are claims as they are written.
type rawClaims struct{ json.RawMessage }

func (rawClaims) GetExpirationTime() (*jwt.NumericDate, error) { return nil, nil }
func (rawClaims) GetIssuedAt() (*jwt.NumericDate, error)       { return nil, nil }
func (rawClaims) GetNotBefore() (*jwt.NumericDate, error)      { return nil, nil }
func (rawClaims) GetIssuer() (string, error)                   { return "", nil }
func (rawClaims) GetSubject() (string, error)                  { return "", nil }
func (rawClaims) GetAudience() (jwt.ClaimStrings, error)       { return nil, nil }

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
