package crowd

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

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
