package ingress

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/catalog"
)

// countedSales counts queries, and for each sale and page those that include it.
type countedSales struct {
	Sales
	mu    sync.Mutex
	all   int
	at    map[uuid.UUID]int
	pages map[uuid.UUID]int
	now   atomic.Int64
	most  atomic.Int64
}

func (c *countedSales) CountSales(ctx context.Context, ids []uuid.UUID) ([]catalog.CountResult, error) {
	c.mu.Lock()
	c.all++
	for _, id := range ids {
		c.at[id]++
	}
	c.mu.Unlock()
	c.most.Store(max(c.most.Load(), c.now.Add(1)))
	defer c.now.Add(-1)
	// A test may hold mu for longer than the feed waits.
	return c.Sales.CountSales(context.WithoutCancel(ctx), ids)
}

func (c *countedSales) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all
}

func (c *countedSales) CountPage(ctx context.Context, after uuid.UUID, limit int) ([]catalog.CountResult, error) {
	c.mu.Lock()
	c.pages[after]++
	c.mu.Unlock()
	return c.Sales.CountPage(ctx, after, limit)
}

func openCounted(t *testing.T) (*shop, *countedSales) {
	t.Helper()
	c := &countedSales{at: map[uuid.UUID]int{}, pages: map[uuid.UUID]int{}}
	s := openShop(t, func(config *Config) {
		c.Sales = config.Sales
		config.Sales = c
	})
	return s, c
}

// A sale and the list are queried at most twice a second, whatever the number of requests and the lengths
// of pages.
func TestFeedQueriesOnceForAllRequests(t *testing.T) {
	t.Parallel()
	s, queries := openCounted(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	w := s.watch("/v1/sales/" + sale.String() + "/events")
	_, ok := w.next()
	require.True(t, ok)
	const readers, each = 50, 40
	var crowd sync.WaitGroup
	began := time.Now()
	for range readers {
		crowd.Go(func() {
			for n := range each {
				assert.Equal(t, http.StatusOK, s.get("/v1/sales/"+sale.String()).status)
				assert.Equal(t, http.StatusOK, s.get(fmt.Sprintf("/v1/sales?limit=%d", n+1)).status)
			}
		})
	}
	crowd.Wait()
	most := int(time.Since(began)/refreshInterval) + 3
	queries.mu.Lock()
	defer queries.mu.Unlock()
	t.Logf("%d queries of the sale and %d of the list for %d requests",
		queries.at[sale], queries.pages[uuid.Nil], 2*readers*each)
	require.LessOrEqual(t, queries.at[sale], most)
	require.LessOrEqual(t, queries.pages[uuid.Nil], most)
}

// Made-up ids cost few queries and bounded memory, and keep no client from a sale that exists.
func TestFeedBatchesUnknownSales(t *testing.T) {
	t.Parallel()
	s, queries := openCounted(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
	before := queries.count()
	const unknown = 100
	var crowd sync.WaitGroup
	queries.mu.Lock() // a query waits
	release := sync.OnceFunc(queries.mu.Unlock)
	defer release()
	for range unknown {
		crowd.Go(func() {
			r := s.get("/v1/sales/" + uuid.Must(uuid.NewV7()).String())
			if r.status != http.StatusNotFound {
				t.Errorf("%d %s", r.status, r.body)
			}
			assert.Equal(t, "no-store", r.header.Get("Cache-Control"))
		})
	}
	testkit.Eventually(t, 30*time.Second, "all are requested", func() bool {
		s.server.sales.feed.mu.Lock()
		defer s.server.sales.feed.mu.Unlock()
		return len(s.server.sales.feed.items) >= unknown
	})
	release()
	for range 50 {
		s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
	}
	crowd.Wait()
	made := queries.count() - before
	t.Logf("%d queries of %d unknown sales", made, unknown)
	require.Less(t, made, unknown/2)
	require.EqualValues(t, 1, queries.most.Load(), "concurrent queries")
	testkit.Eventually(t, 10*refreshInterval, "the items are forgotten", func() bool {
		s.server.sales.feed.mu.Lock()
		defer s.server.sales.feed.mu.Unlock()
		return len(s.server.sales.feed.items) <= 1
	})
}

// Items in memory are still answered.
func TestFullFeedRefusesNewItems(t *testing.T) {
	t.Parallel()
	s, _ := openCounted(t)
	sale, other := s.sale(reservation.Terms{Stock: 10}), s.sale(reservation.Terms{Stock: 10})
	s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
	s.server.sales.feed.mu.Lock()
	s.server.sales.feed.itemsMax = 1
	s.server.sales.feed.mu.Unlock()
	r := s.get("/v1/sales/" + other.String())
	r.isProblem(http.StatusServiceUnavailable, "overloaded")
	require.Equal(t, "no-store", r.header.Get("Cache-Control"))
	s.get("/v1/sales/"+other.String()+"/events").isProblem(http.StatusServiceUnavailable, "overloaded")
	s.get("/v1/sales/" + sale.String()).is(http.StatusOK)
}

// A client that requests pages from many places of the list keeps others out for a moment only.
func TestFeedForgetsPages(t *testing.T) {
	t.Parallel()
	s, _ := openCounted(t)
	s.server.sales.laterPagesFeed.mu.Lock()
	s.server.sales.laterPagesFeed.itemsMax = 1
	s.server.sales.laterPagesFeed.mu.Unlock()
	page := func() string { return "/v1/sales?cursor=" + cursorAfter(uuid.Must(uuid.NewV7())) }
	s.get(page()).is(http.StatusOK)
	testkit.Eventually(t, 30*time.Second, "another page is shown", func() bool {
		return s.get(page()).status == http.StatusOK
	})
}

// A cache may keep an answer for a second, and revalidate it.
func TestSaleAnswersHaveETags(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	id := s.sale(reservation.Terms{Stock: 10})
	for _, path := range []string{"/v1/sales/" + id.String(), "/v1/sales", "/v1/sales?limit=1"} {
		first := s.get(path)
		first.is(http.StatusOK)
		tag := first.header.Get("ETag")
		require.Regexp(t, `^"[\w-]{16}"$`, tag)
		require.Equal(t, "public, max-age=1", first.header.Get("Cache-Control"))
		for _, has := range []string{tag, "W/" + tag, `"other", ` + tag, "*"} {
			same := s.get(path, reqHeader{"If-None-Match", has})
			require.Equal(t, []any{http.StatusNotModified, ""}, []any{same.status, same.body}, has)
			require.Equal(
				t, []string{tag, "public, max-age=1"}, []string{same.header.Get("ETag"), same.header.Get("Cache-Control")},
			)
		}
		for _, has := range []string{`"other"`, `W/"other"`, "", "*x"} {
			require.Equal(t, first.body, s.get(path, reqHeader{"If-None-Match", has}).body)
		}
		s.post("/v1/sales/"+id.String()+"/restock", `{"units":1}`, operator).is(http.StatusOK)
		changed := s.get(path, reqHeader{"If-None-Match", tag})
		changed.is(http.StatusOK)
		require.NotEqual(t, tag, changed.header.Get("ETag"))
	}
	for _, path := range []string{"/v1/sales/x", "/v1/sales?limit=0", "/v1/sales/" + uuid.NewString()} {
		r := s.get(path)
		require.GreaterOrEqual(t, r.status, 400)
		require.Equal(t, []string{"no-store", ""}, []string{r.header.Get("Cache-Control"), r.header.Get("ETag")})
	}
}

// The server that made the change shows it immediately, every other one within a second.
func TestFeedShowsOperatorsChanges(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	other := openShopOn(t, s.on)
	sale := "/v1/sales/" + s.sale(reservation.Terms{Stock: 10}).String()
	state := func(on *shop) any { return on.get(sale).is(http.StatusOK)["state"] }
	for range 3 {
		for _, c := range [][2]string{{"/pause", "paused"}, {"/resume", "open"}} {
			state(other)
			s.post(sale+c[0], "", operator).is(http.StatusOK)
			changed := time.Now()
			require.Equal(t, c[1], state(s))
			listed := s.get("/v1/sales").is(http.StatusOK)["sales"].([]any)
			require.True(t, slices.ContainsFunc(listed, func(v any) bool { return v.(map[string]any)["state"] == c[1] }))
			for {
				asked := time.Now()
				if state(other) == c[1] {
					break
				}
				require.Less(t, asked.Sub(changed), answerMaxAge, "a snapshot that is too old was shown")
			}
		}
	}
}

// An anonymous request is delayed while a buyer is served, and answered all the same.
func TestSaleRequestsYieldToPayments(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	order, id := s.confirm(sale, "ada")
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	paid := s.inBackground(func() reply { return s.pay(order, "r-1", as("ada")) })
	testkit.Eventually(t, 30*time.Second, "a payment is in progress", func() bool {
		return s.server.inFlight.orders.taken.Load() == 1
	})
	for _, path := range []string{"/v1/sales/" + sale.String(), "/v1/sales"} {
		began := time.Now()
		s.get(path).is(http.StatusOK)
		require.GreaterOrEqual(t, time.Since(began), yieldPause)
	}
	require.EqualValues(t, 1, s.server.inFlight.orders.taken.Load(), "the payment has ended")
	require.NoError(t, tx.Rollback(t.Context()))
	(<-paid).is(http.StatusOK)
}

// newSales returns ids in the order of creation.
func newSales(n int) []uuid.UUID {
	ids := make([]uuid.UUID, n)
	for i := range ids {
		ids[i] = uuid.UUID{1, byte(i >> 8), byte(i)}
	}
	return ids
}

func (m *saleMetrics) counted(sale string, outcome saleOutcome) float64 {
	return testutil.ToFloat64(m.purchases.WithLabelValues(sale, saleOutcomeLabels[outcome]))
}

func TestFollowedSalesHaveSeries(t *testing.T) {
	t.Parallel()
	m, sales := newSaleMetrics(), newSales(saleSeriesMax+2)
	require.Equal(t, 4, testutil.CollectAndCount(m.purchases), "the others")
	m.count(sales[1], saleAccepted, true)
	m.count(sales[1], saleShed, false)
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleAccepted))
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleShed))
	m.count(uuid.UUID{9}, saleRefused, false)
	require.EqualValues(t, 1, m.counted(otherSales, saleRefused), "a sale that may not exist gets no series")
	require.Equal(t, 2*4, testutil.CollectAndCount(m.purchases))

	newest, selling := sales[saleSeriesMax+1], sales[0] // the catalog names those first that sell
	m.follow(sales[:saleSeriesMax]...)
	require.Equal(t, (saleSeriesMax+1)*4, testutil.CollectAndCount(m.purchases))
	m.count(newest, saleFailed, true)
	m.count(selling, saleAccepted, true)
	require.EqualValues(t, 1, m.counted(otherSales, saleFailed))
	require.EqualValues(t, 1, m.counted(selling.String(), saleAccepted))
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleAccepted), "it has kept its own")
	m.follow(sales[2:]...)
	require.Equal(t, (saleSeriesMax+1)*4, testutil.CollectAndCount(m.purchases), "others have lost their series")
	m.count(newest, saleFailed, true)
	require.EqualValues(t, 1, m.counted(newest.String(), saleFailed))
}

// A sale that is asked for gets series although there are enough others, and keeps them for a while.
func TestActiveSalesAreFollowed(t *testing.T) {
	t.Parallel()
	m, sales := newSaleMetrics(), newSales(saleSeriesMax+1)
	asked := sales[0]
	m.follow(sales[1:]...)
	require.Empty(t, m.active())
	m.count(asked, saleRefused, true)
	require.EqualValues(t, 1, m.counted(otherSales, saleRefused))
	require.Equal(t, []uuid.UUID{asked}, m.active())
	require.Empty(t, m.active())
	m.follow(slices.Concat([]uuid.UUID{asked}, sales[1:])...)
	m.count(asked, saleRefused, true)
	require.EqualValues(t, 1, m.counted(asked.String(), saleRefused))
	for range activeLooks {
		require.Equal(t, []uuid.UUID{asked}, m.active())
	}
	require.Empty(t, m.active())
}

func TestCountOfPurchaseAllocatesNothing(t *testing.T) {
	m, sale := newSaleMetrics(), newSales(1)[0]
	require.NoError(t, register(prometheus.NewRegistry(), m.purchases))
	m.add(sale)
	require.Zero(t, testing.AllocsPerRun(100, func() { m.count(sale, saleRefused, true) }))
}
