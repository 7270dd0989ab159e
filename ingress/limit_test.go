package ingress

import (
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

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
