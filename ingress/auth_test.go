package ingress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

const jwtSecret = "a secret of at least 32 bytes, as HS256 wants"

func tokenClaims(change ...func(jwt.MapClaims)) jwt.MapClaims {
	c := jwt.MapClaims{
		"sub": "ada",
		"exp": time.Now().Add(time.Hour).Unix(),
		"iss": "https://issuer.example",
		"aud": "stampede",
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func withClaim(name string, value any) func(jwt.MapClaims) {
	return func(c jwt.MapClaims) { c[name] = value }
}

func withoutClaim(name string) func(jwt.MapClaims) {
	return func(c jwt.MapClaims) { delete(c, name) }
}

func sign(t testing.TB, method jwt.SigningMethod, key any, kid string, c jwt.MapClaims) string {
	t.Helper()
	token := jwt.NewWithClaims(method, c)
	if kid != "" {
		token.Header["kid"] = kid
	}
	text, err := token.SignedString(key)
	require.NoError(t, err)
	return text
}

// noneKey lets a test sign with the method "none".
const noneKey = jwt.UnsafeAllowNoneSignatureType

// expiredClaim is a second beyond the leeway.
func expiredClaim(c jwt.MapClaims) { c["exp"] = time.Now().Unix() - 31 }

// withJWT also requires issuer and audience.
func withJWT(c *Config) {
	c.Auth, c.JWTSecret, c.JWTIssuer, c.JWTAudience = AuthJWT, jwtSecret, "https://issuer.example", "stampede"
}

func TestAuthVerifiesTokensWithSecret(t *testing.T) {
	t.Parallel()
	s := openShop(t, withJWT)
	sale := s.sale(reservation.Terms{Stock: 10})
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	hs256 := func(change ...func(jwt.MapClaims)) string {
		return sign(t, jwt.SigningMethodHS256, []byte(jwtSecret), "", tokenClaims(change...))
	}
	forged := strings.Split(hs256(), ".")
	forged[1] = base64.RawURLEncoding.EncodeToString(
		[]byte(`{"sub":"eve","exp":99999999999,"iss":"https://issuer.example","aud":"stampede"}`),
	)

	before := s.stock(sale)
	for name, test := range map[string]struct {
		token  string
		detail string
	}{
		"other secret": {sign(t, jwt.SigningMethodHS256, []byte(jwtSecret+"!"), "", tokenClaims()), "not valid"},
		"alg none": {
			sign(t, jwt.SigningMethodNone, noneKey, "", tokenClaims()), "not valid",
		},
		"other hash":          {sign(t, jwt.SigningMethodHS512, []byte(jwtSecret), "", tokenClaims()), "not valid"},
		"RSA":                 {sign(t, jwt.SigningMethodRS256, rsaKey, "", tokenClaims()), "not valid"},
		"claims exchanged":    {strings.Join(forged, "."), "not valid"},
		"no signature":        {strings.Join(forged[:2], ".") + ".", "not valid"},
		"no token":            {"x", "not valid"},
		"expired":             {hs256(withClaim("exp", time.Now().Add(-31*time.Second).Unix())), "expired"},
		"no subject":          {hs256(withoutClaim("sub")), "sub"},
		"an empty subject":    {hs256(withClaim("sub", "")), "sub"},
		"a subject in braces": {hs256(withClaim("sub", "{0}")), "sub"},
		"a subject of two":    {hs256(withClaim("sub", "a b")), "sub"},
		"a long subject":      {hs256(withClaim("sub", strings.Repeat("u", 129))), "sub"},
		"a number as subject": {hs256(withClaim("sub", 7)), "not valid"},
		"no expiry":           {hs256(withoutClaim("exp")), "lacks"},
		"expiry as text":      {hs256(withClaim("exp", "tomorrow")), "not valid"},
		"not valid yet":       {hs256(withClaim("nbf", time.Now().Add(time.Hour).Unix())), "yet"},
		"other issuer":        {hs256(withClaim("iss", "https://issuer.example.evil")), "issuer"},
		"no issuer":           {hs256(withoutClaim("iss")), "lacks"},
		"other audience":      {hs256(withClaim("aud", "shop")), "audience"},
		"other audiences":     {hs256(withClaim("aud", []string{"shop", "till"})), "audience"},
		"no audience":         {hs256(withoutClaim("aud")), "lacks"},
		"too long to be one":  {strings.Repeat("x.", 2000), "not valid"},
	} {
		r := s.buy(sale, "", bearing(test.token))
		require.Contains(t, r.isProblem(http.StatusUnauthorized, "unauthorized")["detail"], test.detail, name)
		require.Contains(t, r.header.Get("WWW-Authenticate"), `error="invalid_token"`, name)
	}
	for name, headers := range map[string][]reqHeader{
		"no header": nil, "another scheme": {{"Authorization", "Basic eA=="}},
		"no scheme": {{"Authorization", hs256()}}, "the header of the other mode": {as("ada")},
	} {
		r := s.buy(sale, "", headers...)
		r.isProblem(http.StatusUnauthorized, "unauthorized")
		require.Equal(t, `Bearer realm="stampede"`, r.header.Get("WWW-Authenticate"), name)
	}
	require.Equal(t, before, s.stock(sale))

	r := s.buy(sale, "", bearing(hs256(withClaim("aud", []string{"till", "stampede"}))))
	r.is(http.StatusAccepted)
	require.Equal(t, "ada", s.get(r.header.Get("Location"), bearing(hs256())).is(http.StatusOK)["user_id"])
	s.get(r.header.Get("Location"), bearing(hs256(withClaim("sub", "bob")))).
		isProblem(http.StatusNotFound, "order-not-found")
	s.get(r.header.Get("Location")).isProblem(http.StatusUnauthorized, "unauthorized")

	// The leeway is half a minute. Fifteen seconds leave time for a busy machine.
	for _, off := range []func(jwt.MapClaims){
		withClaim("exp", time.Now().Add(-15*time.Second).Unix()), withClaim("nbf", time.Now().Add(30*time.Second).Unix()),
		withClaim("iat", time.Now().Add(30*time.Second).Unix()),
	} {
		s.get(r.header.Get("Location"), bearing(hs256(off))).is(http.StatusOK)
	}
}

// issuer publishes public keys as an identity provider does.
type issuer struct {
	*httptest.Server
	rsa  *rsa.PrivateKey
	ec   *ecdsa.PrivateKey
	keys atomic.Pointer[[]map[string]string]
	// down has it answer 500.
	down atomic.Bool
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	i := new(issuer)
	var err error
	i.rsa, err = rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	i.ec, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	i.keys.Store(&[]map[string]string{{
		"kty": "RSA", "kid": "rsa", "use": "sig", "alg": "RS256", "n": encode(i.rsa.N.Bytes()),
		"e": encode(big.NewInt(int64(i.rsa.E)).Bytes()),
	}, {
		"kty": "EC", "kid": "ec", "use": "sig", "alg": "ES256", "crv": "P-256",
		"x": encode(i.ec.X.FillBytes(make([]byte, 32))), "y": encode(i.ec.Y.FillBytes(make([]byte, 32))),
	}})
	i.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if i.down.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"keys": *i.keys.Load()})
	}))
	t.Cleanup(i.Close)
	return i
}

func encode(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func withIssuer(i *issuer) func(*Config) {
	return func(c *Config) {
		c.Auth, c.JWKSURL, c.JWTIssuer, c.JWTAudience = AuthJWT, i.URL, "https://issuer.example", "stampede"
	}
}

func TestAuthVerifiesTokensWithKeySet(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	s := openShop(t, withIssuer(i))
	sale := s.sale(reservation.Terms{Stock: 10})
	stranger, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(&i.rsa.PublicKey)
	require.NoError(t, err)
	publicPEM := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})
	published := []byte(jwtSecret)
	i.keys.Store(new(append(*i.keys.Load(), map[string]string{"kty": "oct", "kid": "oct", "k": encode(published)})))

	before := s.stock(sale)
	for name, token := range map[string]string{
		// Taken for a secret, the public key would let anybody in.
		"HMAC with the public key in PEM": sign(t, jwt.SigningMethodHS256, publicPEM, "rsa", tokenClaims()),
		"HMAC with the public key in DER": sign(t, jwt.SigningMethodHS256, public, "rsa", tokenClaims()),
		"HMAC with the modulus":           sign(t, jwt.SigningMethodHS256, i.rsa.N.Bytes(), "rsa", tokenClaims()),
		"HMAC with a secret in the set":   sign(t, jwt.SigningMethodHS256, published, "oct", tokenClaims()),
		"alg none":                        sign(t, jwt.SigningMethodNone, noneKey, "rsa", tokenClaims()),
		"a stranger's key":                sign(t, jwt.SigningMethodRS256, stranger, "rsa", tokenClaims()),
		"a stranger's key, no kid":        sign(t, jwt.SigningMethodRS256, stranger, "", tokenClaims()),
		"an unknown kid":                  sign(t, jwt.SigningMethodRS256, stranger, "stranger", tokenClaims()),
		"the kid of another key":          sign(t, jwt.SigningMethodES256, i.ec, "rsa", tokenClaims()),
		"another method of the same key":  sign(t, jwt.SigningMethodRS512, i.rsa, "rsa", tokenClaims()),
		"expired":                         sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims(expiredClaim)),
		"no expiry":                       sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims(withoutClaim("exp"))),
		"other issuer":                    sign(t, jwt.SigningMethodES256, i.ec, "ec", tokenClaims(withClaim("iss", "x"))),
		"other audience":                  sign(t, jwt.SigningMethodES256, i.ec, "ec", tokenClaims(withClaim("aud", "x"))),
	} {
		r := s.buy(sale, "", bearing(token))
		require.Equal(t, http.StatusUnauthorized, r.status, name)
		r.isProblem(http.StatusUnauthorized, "unauthorized")
	}
	require.Equal(t, before, s.stock(sale))

	for user, token := range map[string]string{
		"r": sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims(withClaim("sub", "r"))),
		"e": sign(t, jwt.SigningMethodES256, i.ec, "ec", tokenClaims(withClaim("sub", "e"))),
		"n": sign(t, jwt.SigningMethodRS256, i.rsa, "", tokenClaims(withClaim("sub", "n"))),
	} {
		r := s.buy(sale, "", bearing(token))
		r.is(http.StatusAccepted)
		require.Equal(t, user, s.get(r.header.Get("Location"), bearing(token)).is(http.StatusOK)["user_id"])
	}
}

// Without any keys the answer is 503, because the token may be valid. Fetched keys stay valid while the
// issuer is down, or answers without keys.
func TestAuthKeepsKeysWhileIssuerIsDown(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	i.down.Store(true)
	s := openShop(t, withIssuer(i))
	sale := s.sale(reservation.Terms{Stock: 10})
	token := bearing(sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims()))
	s.buy(sale, "", token).isProblem(http.StatusServiceUnavailable, "sale-unavailable")

	i.down.Store(false)
	later := openShopOn(t, s.on, withIssuer(i))
	i.down.Store(true)
	sale = later.sale(reservation.Terms{Stock: 10})
	later.buy(sale, "", token).is(http.StatusAccepted)

	i.down.Store(false)
	i.keys.Store(&[]map[string]string{})
	unknown := bearing(sign(t, jwt.SigningMethodRS256, i.rsa, "rsa-2", tokenClaims())) // has the keys fetched
	later.buy(sale, "", unknown).isProblem(http.StatusUnauthorized, "unauthorized")
	later.buy(sale, "", token).isProblem(http.StatusConflict, "already-purchased")
}

func TestAuthFetchesNewKeys(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	s := openShop(t, withIssuer(i))
	sale := s.sale(reservation.Terms{Stock: 10})
	rotated := *i.keys.Load()
	renamed := map[string]string{}
	for name, value := range rotated[0] {
		renamed[name] = value
	}
	renamed["kid"] = "rsa-2"
	i.keys.Store(&[]map[string]string{renamed})
	s.buy(sale, "", bearing(sign(t, jwt.SigningMethodRS256, i.rsa, "rsa-2", tokenClaims()))).is(http.StatusAccepted)
	s.buy(sale, "", bearing(sign(t, jwt.SigningMethodRS256, i.rsa, "rsa", tokenClaims()))).
		isProblem(http.StatusUnauthorized, "unauthorized")
}

func TestNewRejectsInvalidConfig(t *testing.T) {
	t.Parallel()
	s := prepareShop(t, sharedServers(t))
	for complaint, change := range map[string]func(*Config){
		"STAMPEDE_JWT_SECRET or STAMPEDE_JWKS_URL": func(c *Config) { c.Auth = AuthJWT },
		"not both": func(c *Config) {
			c.Auth, c.JWTSecret, c.JWKSURL = AuthJWT, jwtSecret, "https://issuer.example/keys"
		},
		"has 31 bytes, HS256 needs at least 32": func(c *Config) {
			c.Auth, c.JWTSecret = AuthJWT, jwtSecret[:31]
		},
		"STAMPEDE_JWKS_URL must be an http or https URL":        func(c *Config) { c.Auth, c.JWKSURL = AuthJWT, "keys.json" },
		`the auth mode (STAMPEDE_AUTH) is "", want`:             func(c *Config) { c.Auth = "" },
		`the auth mode (STAMPEDE_AUTH) is "none", want`:         func(c *Config) { c.Auth = "none" },
		"STAMPEDE_AUTH_HEADER":                                  func(c *Config) { c.AuthHeader = "X User" },
		"the admin token (STAMPEDE_ADMIN_TOKEN) must be":        func(c *Config) { c.AdminToken = "token\n" },
		"Reservations, Sales, Orders and Postgres are required": func(c *Config) { c.Orders = nil },
		"MaxInFlight is -1":                                     func(c *Config) { c.MaxInFlight = -1 },
		"StopDelay and DrainTimeout must not be negative":       func(c *Config) { c.DrainTimeout = -1 },
	} {
		config := s.server.config
		config.Metrics = nil
		change(&config)
		_, err := New(config)
		require.ErrorContains(t, err, complaint)
		require.NotContains(t, err.Error(), jwtSecret[:31])
	}
}

func TestAuthHeaderIsConfigurable(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.AuthHeader = "x-buyer" })
	sale := s.sale(reservation.Terms{Stock: 1})
	s.buy(sale, "", as(uuid.NewString())).isProblem(http.StatusUnauthorized, "unauthorized")
	s.buy(sale, "", reqHeader{"X-Buyer", "ada@example.org"}).is(http.StatusAccepted)
}

func fromAddress(address string) reqHeader { return reqHeader{"X-Forwarded-For", address} }

// behindProxy trusts the test as a proxy, so that its requests can have any address.
func behindProxy(c *Config) { c.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")} }

// isLimited checks that the answer is 429, and its Retry-After.
func (r reply) isLimited(least, most int) {
	r.t.Helper()
	r.isProblem(http.StatusTooManyRequests, "rate-limited")
	seconds, err := strconv.Atoi(r.header.Get("Retry-After"))
	require.NoError(r.t, err)
	require.True(r.t, least <= seconds && seconds <= most, "%d", seconds)
}

func TestEachUserIsRateLimited(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.UserLimit = Limit{Rate: 1.0 / 600, Burst: 2} })
	sale := s.sale(reservation.Terms{Stock: 10})
	bought := s.buy(sale, "", as("ann")).is(http.StatusAccepted)
	s.buy(sale, "", as("ann")).isProblem(http.StatusConflict, "already-purchased")
	before := s.stock(sale)
	s.buy(sale, "", as("ann")).isLimited(590, 600)
	other := s.sale(reservation.Terms{Stock: 10})
	s.buy(other, "", as("ann")).isLimited(590, 600)
	require.Equal(t, before, s.stock(sale), "nothing changed")
	require.Empty(t, s.stock(other).Buyers)
	s.buy(sale, "", as("bob")).is(http.StatusAccepted)
	require.NotContains(t, s.get("/metrics").body, `stampede_purchases_total{verdict="rate-limited"} 0`)
	require.Contains(t, s.get("/metrics").body, `stampede_rate_limited_total{by="user",calls="purchases"} 2`)

	// Purchases do not count against calls on orders,
	path := "/v1/orders/" + bought["order_id"].(string)
	s.get(path, as("ann")).is(http.StatusOK)
	s.post(path+"/pay", `{"reference":"r"}`, as("ann")).isProblem(http.StatusConflict, "order-not-confirmed")
	for _, limited := range []reply{
		s.post(path+"/pay", `{"reference":"r"}`, as("ann")), s.post(path+"/cancel", "", as("ann")), s.get(path, as("ann")),
		s.get("/v1/orders", as("ann")), s.get(path+"/events", as("ann")),
	} {
		limited.isLimited(590, 600)
	}
	// nor the other way round.
	s.get("/v1/orders", as("cid")).is(http.StatusOK)
	s.get("/v1/orders", as("cid")).is(http.StatusOK)
	s.get("/v1/orders", as("cid")).isLimited(590, 600)
	s.buy(sale, "", as("cid")).is(http.StatusAccepted)
	// A request without a user takes from no bucket.
	s.get("/v1/orders").isProblem(http.StatusUnauthorized, "unauthorized")
}

func TestRetryAfterIsAtLeastASecond(t *testing.T) {
	t.Parallel()
	s := openShop(t, func(c *Config) { c.UserLimit = Limit{Rate: 5, Burst: 1} })
	sale := s.sale(reservation.Terms{Stock: 1})
	testkit.Eventually(t, 20*time.Second, "a request is refused", func() bool {
		r := s.buy(sale, "", as("ann"))
		if r.status != http.StatusTooManyRequests {
			return false
		}
		r.isLimited(1, 1)
		return true
	})
}

func TestAddressIsRateLimitedBeforeAuthentication(t *testing.T) {
	t.Parallel()
	s := openShop(t, behindProxy, func(c *Config) { c.AddressLimit = Limit{Rate: 1.0 / 600, Burst: 2} })
	sale := s.sale(reservation.Terms{Stock: 10})
	here, next := fromAddress("2001:db8:1:2::1"), fromAddress("2001:db8:1:2:ffff::9")
	there := fromAddress("2001:db8:1:3::1")
	s.buy(sale, "", here).isProblem(http.StatusUnauthorized, "unauthorized")
	s.buy(sale, "", as("ann"), next).is(http.StatusAccepted)
	before := s.stock(sale)
	s.buy(sale, "", here).isLimited(590, 600)
	s.buy(sale, "", as("bob"), next).isLimited(590, 600)
	require.Equal(t, before, s.stock(sale), "nothing changed")
	s.buy(sale, "", as("bob"), there).is(http.StatusAccepted)
	// Other kinds of calls have buckets of their own.
	for range 2 {
		s.get("/v1/orders", as("ann"), here).is(http.StatusOK)
		s.get("/v1/sales/"+sale.String(), here).is(http.StatusOK)
	}
	s.get("/v1/orders", as("ann"), here).isLimited(590, 600)
	s.get("/v1/sales/"+sale.String(), here).isLimited(590, 600)
	s.get("/v1/sales", here).isLimited(590, 600)
	s.post("/v1/sales", `{}`, bearing("a guess"), here).isLimited(590, 600)
	for range 5 {
		s.get("/readyz", here).is(http.StatusOK)
		s.get("/livez", here).is(http.StatusOK)
	}
	text := s.get("/metrics", here).body
	require.Contains(t, text, `stampede_rate_limited_total{by="address",calls="purchases"} 2`)
	require.Contains(t, text, `stampede_rate_limited_total{by="address",calls="others"} 3`)
}

// One client cannot take all streams, neither from one address nor as one user from many addresses.
func TestStreamsAreLimitedByUserAndAddress(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t, behindProxy, func(c *Config) { c.MaxStreams, c.UserStreams, c.AddressStreams = 12, 2, 3 })
	sale := s.sale(reservation.Terms{Stock: 10})
	path, _, receipt := s.purchased(sale, "ann")
	sales, orders := "/v1/sales/"+sale.String()+"/events", withReceipt(path+"/events", receipt)
	greedy, other := fromAddress("192.0.2.1"), fromAddress("192.0.2.2")

	var held []*eventReader
	for range 3 {
		held = append(held, s.watch(sales, greedy))
	}
	for _, w := range held {
		require.Equal(t, http.StatusOK, w.status)
	}
	s.get(sales, greedy).isLimited(1, 5)
	require.Equal(t, http.StatusOK, s.watch(sales, other).status, "there is room for others")

	first := s.watch(orders, as("ann"), greedy)
	require.Equal(t, http.StatusOK, first.status)
	require.Equal(t, http.StatusOK, s.watch(orders, as("ann"), other).status)
	s.get(orders, as("ann"), fromAddress("192.0.2.3")).isLimited(1, 5)
	theirs, _, receiptOfBob := s.purchased(sale, "bob")
	require.Equal(t, http.StatusOK, s.watch(withReceipt(theirs+"/events", receiptOfBob), as("bob"), greedy).status)

	// A stream that ends releases its slots.
	held[0].stop()
	first.stop()
	for path, headers := range map[string][]reqHeader{sales: {greedy}, orders: {as("ann"), greedy}} {
		testkit.Eventually(t, 20*time.Second, path+" is opened again", func() bool {
			return s.watch(path, headers...).status == http.StatusOK
		})
	}
	require.Len(t, s.server.limits.saleStreams.byAddress.taken, 2)
}

func TestEchoKnowsClientAddressBehindProxies(t *testing.T) {
	t.Parallel()
	s := openShop(t, behindProxy)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr, r.Header = "127.0.0.1:4000", http.Header{
		"X-Forwarded-For": {"8.8.8.8, 203.0.113.9"},
		"X-Real-Ip":       {"8.8.4.4"},
	}
	require.Equal(t, "203.0.113.9", s.server.router.echo.NewContext(r, nil).RealIP())
}
