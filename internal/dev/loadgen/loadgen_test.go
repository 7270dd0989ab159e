package loadgen

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// shop answers like an ingress. before, if set, gets each request first and may answer it.
type shop struct {
	before func(n int, w http.ResponseWriter, r *http.Request) (answered bool)

	mu       sync.Mutex
	stock    int
	requests int
	holds    map[string]held // by user
}

type held struct {
	key   string
	order uuid.UUID
}

// receiptOf returns the receipt that this shop accepts.
func receiptOf(order uuid.UUID) string { return "receipt+of " + order.String() }

func (s *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests++
	n := s.requests
	s.mu.Unlock()
	if s.before != nil && s.before(n, w, r) {
		return
	}
	s.sell(w, r)
}

func (s *shop) sell(w http.ResponseWriter, r *http.Request) {
	user, key := r.Header.Get("X-User-ID"), r.Header.Get("Idempotency-Key")
	s.mu.Lock()
	defer s.mu.Unlock()
	h, holds := s.holds[user]
	switch {
	case holds && h.key == key:
		w.Header().Set("Idempotency-Replayed", "true")
		acceptOrder(w, h.order)
	case holds:
		w.Header().Set("Location", "/v1/orders/"+h.order.String())
		writeProblem(w, http.StatusConflict, "already-purchased")
	case s.stock == 0:
		writeProblem(w, http.StatusConflict, "sold-out")
	default:
		s.stock--
		h = held{key, uuid.New()}
		s.holds[user] = h
		acceptOrder(w, h.order)
	}
}

func acceptOrder(w http.ResponseWriter, order uuid.UUID) {
	w.Header().Set("Location", "/v1/orders/"+order.String())
	w.WriteHeader(http.StatusAccepted)
	_ = json.NewEncoder(w).Encode(map[string]any{"order_id": order, "receipt": receiptOf(order)})
}

func writeProblem(w http.ResponseWriter, status int, slug string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"type": "/problems/" + slug, "status": status})
}

func openShop(t *testing.T, s *shop) string {
	t.Helper()
	s.holds = make(map[string]held)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return server.URL
}

func send(t *testing.T, config Config) *Crowd {
	t.Helper()
	config.Sale = uuid.New()
	c, err := New(config)
	require.NoError(t, err)
	c.Run(t.Context())
	return c
}

func TestLedgerHoldsEverySoldOrder(t *testing.T) {
	s := &shop{stock: 300}
	c := send(t, Config{
		URLs: []string{openShop(t, s)}, Buyers: 1000, Arrivals: Evenly(200 * time.Millisecond), DoubleClicks: 0.3,
	})

	orders, contradictions := c.Ledger().orders()
	assert.Zero(t, contradictions)
	sold := make(map[uuid.UUID]string)
	for user, h := range s.holds {
		sold[h.order] = user
	}
	assert.Equal(t, sold, orders)

	r := c.Report()
	assert.Equal(t, 300, r.Accepted)
	assert.InDelta(t, 300, r.SecondClicks, 30, "about the configured share")
	// If the first answer came too late, a retry gets the order.
	assert.Equal(t, r.Clicks, c.tally.outcomes[accepted]+r.Replayed+r.Rejected, "each click has exactly one outcome")
	assert.Positive(t, r.Replayed, "some second clicks repeat the first key")
	assert.Positive(t, r.Already, "some second clicks use another key")
	assert.Empty(t, r.Failures)
}

// A stalled server must not hide the requests that it delayed.
func TestLatencyCountsFromDueTime(t *testing.T) {
	const stall = 300 * time.Millisecond
	stalled := make(chan struct{})
	var once sync.Once
	s := &shop{stock: 1000, before: func(int, http.ResponseWriter, *http.Request) bool {
		once.Do(func() { time.AfterFunc(stall, func() { close(stalled) }) })
		<-stalled
		return false
	}}
	c, err := New(Config{URLs: []string{openShop(t, s)}, Buyers: 600, Arrivals: Evenly(600 * time.Millisecond)})
	require.NoError(t, err)
	c.maxActive = 2
	c.Run(t.Context())

	// One buyer per millisecond: those due in the first 300 ms waited 150 ms on average, though only two
	// of them were sent before the stall ended.
	waited := 0
	for _, bar := range c.tally.winners.Distribution() {
		if bar.From > (100 * time.Millisecond).Microseconds() {
			waited += int(bar.Count)
		}
	}
	assert.Greater(t, waited, 150)
	assert.GreaterOrEqual(t, c.Report().Winners.Max, 250*time.Millisecond)
}

func TestUnknownOutcomeIsRetriedWithSameKey(t *testing.T) {
	for name, fail := range map[string]func(s *shop, w http.ResponseWriter, r *http.Request){
		"the reply is lost": func(s *shop, _ http.ResponseWriter, r *http.Request) {
			s.sell(httptest.NewRecorder(), r) // sold, and the buyer gets no answer
			panic(http.ErrAbortHandler)
		},
		"the server is too busy": func(_ *shop, w http.ResponseWriter, _ *http.Request) {
			writeProblem(w, http.StatusServiceUnavailable, "overloaded")
		},
		"the client is limited": func(_ *shop, w http.ResponseWriter, _ *http.Request) {
			writeProblem(w, http.StatusTooManyRequests, "rate-limited")
		},
		"a proxy answers with its page": func(s *shop, w http.ResponseWriter, r *http.Request) {
			s.sell(httptest.NewRecorder(), r)
			http.Error(w, "<h1>Forbidden</h1>", http.StatusForbidden)
		},
		"another server accepts": func(_ *shop, w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusAccepted)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &shop{stock: 50}
			s.before = func(n int, w http.ResponseWriter, r *http.Request) bool {
				if n%3 != 0 {
					return false
				}
				fail(s, w, r)
				return true
			}
			c := send(t, Config{URLs: []string{openShop(t, s)}, Buyers: 100})
			orders, contradictions := c.Ledger().orders()
			assert.Len(t, orders, 50)
			assert.Zero(t, contradictions)
			assert.Empty(t, c.Ledger().undecided())
			assert.Zero(t, c.Report().Already, "a retry with another key would get already-purchased")
			assert.Positive(t, total(c.Report().Retries))
		})
	}
}

func TestBuyersRetryAtAnotherIngress(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	s := &shop{stock: 40}
	c := send(t, Config{URLs: []string{gone.URL, openShop(t, s)}, Buyers: 40})
	assert.Equal(t, 40, c.Report().Accepted)
	assert.Equal(t, map[string]int{"connection refused": 20}, c.Report().Retries)
}

func TestOutcomeIsUnknownAfterPatience(t *testing.T) {
	s := &shop{before: func(_ int, w http.ResponseWriter, _ *http.Request) bool {
		writeProblem(w, http.StatusServiceUnavailable, "sale-unavailable")
		return true
	}}
	c := send(t, Config{URLs: []string{openShop(t, s)}, Buyers: 3, Patience: time.Second})
	assert.Len(t, c.Ledger().undecided(), 3)
	assert.Equal(t, map[string]int{"sale-unavailable": 3}, c.Report().Failures)
}

func TestOfferedUnitsAreNotOnSale(t *testing.T) {
	s := &shop{before: func(_ int, w http.ResponseWriter, _ *http.Request) bool {
		writeProblem(w, http.StatusConflict, "offers-only")
		return true
	}}
	report := send(t, Config{URLs: []string{openShop(t, s)}, Buyers: 3}).Report()
	assert.Equal(t, 3, report.NotOnSale)
	assert.Empty(t, report.Failures)
}

func TestLedgerFindsContradictions(t *testing.T) {
	one, two := uuid.New(), uuid.New()
	l := newLedger(3, 1)
	l.entries[0].order, l.entries[1].order = one, two // buyer 0 holds two orders
	l.entries[2].order = one                          // buyer 1 holds one of them too
	orders, contradictions := l.orders()
	assert.Len(t, orders, 2)
	assert.Equal(t, 1, contradictions)
	assert.Equal(t, [][2]uuid.UUID{{one, two}}, l.pairs())

	// A second purchase after a lost, cancelled or expired order is no contradiction.
	for _, c := range []struct {
		ended map[uuid.UUID]bool
		want  int
	}{
		{map[uuid.UUID]bool{}, 1},
		{map[uuid.UUID]bool{one: false, two: false}, 1},
		{map[uuid.UUID]bool{one: true}, 0},
		{map[uuid.UUID]bool{two: true}, 0},
	} {
		var comparison Comparison
		comparison.countPairs(l, c.ended)
		assert.Equal(t, c.want, comparison.Contradictions, c.ended)
	}
}

func TestJWTAuthCreatesValidToken(t *testing.T) {
	h := http.Header{}
	auth := JWTAuth{Secret: []byte("0123456789abcdef0123456789abcdef"), Issuer: "tests", Audience: "stampede"}
	require.NoError(t, auth.sign(h, "alice"))
	text, found := strings.CutPrefix(h.Get("Authorization"), "Bearer ")
	require.True(t, found)
	token, err := jwt.Parse(text, func(*jwt.Token) (any, error) { return auth.Secret, nil },
		jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired(), jwt.WithIssuer("tests"),
		jwt.WithAudience("stampede"))
	require.NoError(t, err)
	subject, err := token.Claims.GetSubject()
	require.NoError(t, err)
	assert.Equal(t, "alice", subject)
}

func TestNewRejectsInvalidConfig(t *testing.T) {
	good := func() Config { return Config{URLs: []string{"http://localhost:8080"}, Buyers: 1} }
	_, err := New(good())
	require.NoError(t, err)
	for name, invalidate := range map[string]func(*Config){
		"no url":           func(c *Config) { c.URLs = nil },
		"a url without //": func(c *Config) { c.URLs = []string{"localhost:8080"} },
		"no buyers":        func(c *Config) { c.Buyers = 0 },
		"too many buyers":  func(c *Config) { c.Buyers = MaxBuyers + 1 },
		"share above 1":    func(c *Config) { c.DoubleClicks = 1.1 },
		"share NaN":        func(c *Config) { c.DoubleClicks = nan() },
		"negative time":    func(c *Config) { c.Arrivals = Evenly(-1) },
	} {
		c := good()
		invalidate(&c)
		_, err := New(c)
		assert.Error(t, err, name)
	}
}

func nan() float64 { zero := 0.0; return zero / zero }

func TestReportText(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	r := Report{
		Buyers: 50_000, Over: 8 * time.Second, Took: 8100 * time.Millisecond, Quantity: 1, Clicks: 52_500, SecondClicks: 2500,
		Accepted: 10_000, AcceptedRate: 6249.6, FirstAccepted: at, LastAccepted: at.Add(1600 * time.Millisecond),
		Replayed: 240,
		Rejected: 42_260, RejectedRate: 6100, SoldOut: 42_000, Already: 260,
		Retries: map[string]int{"connection reset": 3, "overloaded": 12},
		Winners: Latencies{Count: 10, P50: 412 * time.Microsecond, Max: time.Second},
		Durable: &Durable{Orders: 10_000, Rate: 6172, LastAt: at.Add(1620 * time.Millisecond)},
	}
	var out bytes.Buffer
	require.NoError(t, r.WriteText(&out))
	assert.Equal(t, strings.TrimPrefix(`
crowd     50,000 buyers   6,250/s offered  2,500 double clicks, last answer after 8.1 s
accepted  10,000 orders   6,250/s          240 answers replayed
rejected  42,260 answers  6,100/s          sold-out 42,000, already-purchased 260
durable   10,000 orders   6,172/s          the last 20 ms after the last acceptance
retried   15 tries                         overloaded 12, connection reset 3
failed    0 clicks

  latency, ms   p50   p99  p99.9      max
      winners  0.41  0.00   0.00  1000.00
`, "\n"), out.String())

	out.Reset()
	require.NoError(t, Report{Buyers: 1, Failures: map[string]int{"connection refused": 1}}.WriteText(&out))
	assert.Contains(t, out.String(), "connection refused 1\n")
	assert.NotContains(t, out.String(), "latency", "a header without rows")
}

func putSale(t *testing.T, pool *pgxpool.Pool) uuid.UUID {
	t.Helper()
	sale := uuid.New()
	_, err := pool.Exec(t.Context(), `INSERT INTO sales (id, name, stock) VALUES ($1, 'test', 100)`, sale)
	require.NoError(t, err)
	return sale
}

func putOrder(t *testing.T, pool *pgxpool.Pool, sale, id uuid.UUID, user, status string) {
	t.Helper()
	_, err := pool.Exec(t.Context(),
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES ($1, $2, $3, 1, $4, 2, 1, 1, now(), now())`, id, sale, user, status)
	require.NoError(t, err)
}

func TestPostgresVerifierComparesEachOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	putOrder(t, pool, sale, uuid.New(), "an earlier buyer", "confirmed")
	verifier, err := NewPostgresVerifier(t.Context(), pool, sale)
	require.NoError(t, err)

	l := newLedger(10, 1)
	acceptOrder := func(buyer int) uuid.UUID {
		id := uuid.New()
		*l.at(click{buyer: buyer}) = clickRecord{order: id, outcome: accepted}
		return id
	}
	putOrder(t, pool, sale, acceptOrder(0), l.user(0), "confirmed")
	c, err := verifier.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, Comparison{Accepted: 1, Found: 1}, c)
	assert.True(t, c.Holds())

	putOrder(t, pool, sale, acceptOrder(1), l.user(1), "rejected")
	for buyer, status := range []string{6: "voided", 7: "cancelled", 8: "expired", 9: "paid"} {
		if status != "" {
			putOrder(t, pool, sale, acceptOrder(buyer), l.user(buyer), status)
		}
	}
	putOrder(t, pool, sale, acceptOrder(2), "another user", "confirmed")
	acceptOrder(3) // not in Postgres
	*l.at(click{buyer: 4}) = clickRecord{outcome: unknown}
	putOrder(t, pool, sale, uuid.New(), l.user(4), "confirmed")
	*l.at(click{buyer: 5}) = clickRecord{outcome: soldOut}
	putOrder(t, pool, sale, uuid.New(), l.user(5), "confirmed")
	c, err = verifier.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Len(t, c.Examples, 3)
	c.Examples = nil
	assert.Equal(t, Comparison{
		Accepted: 8, Found: 2, Refused: 1, Voided: 1, Cancelled: 1, Expired: 1, Missing: 1, Altered: 1, Unexpected: 1,
		Recovered: 1,
	}, c)
	assert.Equal(t, "8 accepted, 2 of them found, 1 refused later, 1 voided, 1 cancelled, 1 expired, "+
		"1 without an answer, found, 1 missing, 1 altered, 1 unknown to the crowd", c.String())
	assert.False(t, c.Holds())
}

// The basket in Postgres is the accepted one, item by item.
func TestPostgresVerifierComparesBaskets(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testwork.NewSaleWithItems(t, pool, 10, 10, 10)
	verifier, err := NewPostgresVerifier(t.Context(), pool, sale)
	require.NoError(t, err)
	l := newLedger(2, 2, "item-a", "item-b", "item-c")
	require.Equal(t, `{"items":{"item-a":1,"item-b":1}}`, l.body(0))
	require.Equal(t, `{"items":{"item-b":1,"item-c":1}}`, l.body(1))
	var bought []order.OrderReserved
	for buyer := range 2 {
		basket := testwork.Basket(sale, l.user(buyer), int64(buyer+1), "a1b1")
		*l.at(click{buyer: buyer}) = clickRecord{order: basket.OrderID, outcome: accepted}
		bought = append(bought, basket)
	}
	testwork.Record(t, ledger.New(pool), bought)
	c, err := verifier.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, []int{2, 1, 1}, []int{c.Accepted, c.Found, c.Altered})
	require.Len(t, c.Examples, 1)
	assert.Contains(t, c.Examples[0], `is 2 units {"item-a":1,"item-b":1} for `+l.user(1)+
		`, accepted was 2 {"item-b":1,"item-c":1} for`)
}

func TestWatchDurableEndsWithLastOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	verifier, err := NewPostgresVerifier(t.Context(), pool, sale)
	require.NoError(t, err)
	c := send(t, Config{URLs: []string{openShop(t, &shop{stock: 10})}, Buyers: 20})

	arrive := func(sold int) {
		_, err := pool.Exec(t.Context(), `UPDATE sales SET sold = $2 WHERE id = $1`, sale, sold)
		require.NoError(t, err)
	}
	arrive(9)
	short, err := c.WatchDurable(t.Context(), verifier, 50*time.Millisecond)
	require.NoError(t, err)
	assert.Equal(t, 9, short.Orders, "patience bounds the wait for the missing order")
	assert.Equal(t, "1 accepted orders have not arrived", short.remark(c.Report()))

	arrive(10)
	all, err := c.WatchDurable(t.Context(), verifier, time.Minute)
	require.NoError(t, err)
	assert.Equal(t, 10, all.Orders)
	assert.Positive(t, all.Rate)
	assert.True(t, all.LastAt.After(c.Report().LastAccepted))
}

// statuses makes the shop answer requests for orders with these states, by the buyer's number; the receipt is required.
func statuses(t *testing.T, s *shop, found map[string]string) string {
	t.Helper()
	requests := make(map[string]int)
	s.before = func(_ int, w http.ResponseWriter, r *http.Request) bool {
		id, isOrder := strings.CutPrefix(r.URL.Path, "/v1/orders/")
		if !isOrder {
			if strings.HasSuffix(r.URL.Path, "/orders") {
				return false
			}
			_, _ = w.Write([]byte(`{"sold":0}`))
			return true
		}
		user := r.Header.Get("X-User-ID")
		s.mu.Lock()
		defer s.mu.Unlock()
		requests[user]++
		status := found[user[strings.LastIndexByte(user, '-')+1:]]
		switch {
		case status == "" || r.URL.Query().Get("receipt") != receiptOf(uuid.MustParse(id)):
			writeProblem(w, http.StatusNotFound, "order-not-found")
		case requests[user] == 1:
			writeProblem(w, http.StatusServiceUnavailable, "sale-unavailable") // not decided yet
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"user_id": user, "quantity": 1, "status": status})
		}
		return true
	}
	return openShop(t, s)
}

func TestAPIVerifierSendsReceipts(t *testing.T) {
	t.Parallel()
	url := statuses(t, &shop{stock: 7}, map[string]string{
		"0": "confirmed", "1": "paid", "2": "rejected", "3": "voided", "4": "cancelled", "5": "expired",
	})
	c, err := New(Config{URLs: []string{url}, Buyers: 7, Sale: uuid.New()})
	require.NoError(t, err)
	verifier, err := NewAPIVerifier(t.Context(), url, uuid.New(), HeaderAuth("X-User-ID"))
	require.NoError(t, err)
	c.Run(t.Context())
	got, err := verifier.Compare(t.Context(), c.Ledger())
	require.NoError(t, err)
	assert.Len(t, got.Examples, 1)
	got.Examples = nil
	assert.Equal(t, Comparison{Accepted: 7, Found: 2, Refused: 1, Voided: 1, Cancelled: 1, Expired: 1, Missing: 1}, got)
}

// A lost Redis loses orders that were not in Postgres yet. With the receipt the ingress reports them as voided.
func TestPostgresVerifierLooksUpMissingOrders(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	url := statuses(t, &shop{stock: 3}, map[string]string{"1": "voided"})
	c, err := New(Config{URLs: []string{url}, Buyers: 3, Sale: sale})
	require.NoError(t, err)
	verifier, err := NewPostgresVerifier(t.Context(), pool, sale)
	require.NoError(t, err)
	api, err := NewAPIVerifier(t.Context(), url, sale, HeaderAuth("X-User-ID"))
	require.NoError(t, err)
	verifier.UseAPI(api)
	c.Run(t.Context())
	l := c.Ledger()
	putOrder(t, pool, sale, l.at(click{buyer: 0}).order, l.user(0), "confirmed")
	got, err := verifier.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, Comparison{
		Accepted: 3, Found: 1, Voided: 1, Missing: 1, Examples: []string{
			"order " + l.at(click{buyer: 2}).order.String() + " of " + l.user(2) + " has no final state",
		},
	}, got)
	assert.False(t, got.Holds())
}
