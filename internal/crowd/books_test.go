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

	"stampede/internal/testkit"
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

func TestLedgerIsHeldAgainstPostgresOrderByOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	putOrder(t, pool, sale, uuid.New(), "long before", "confirmed")
	books, err := OpenPostgresBooks(t.Context(), pool, sale)
	require.NoError(t, err)

	l := newLedger(10, 1)
	accepted := func(buyer int) uuid.UUID {
		id := uuid.New()
		*l.at(click{buyer: buyer}) = clickRecord{Order: id, Outcome: accepted}
		return id
	}
	putOrder(t, pool, sale, accepted(0), l.user(0), "confirmed")
	c, err := books.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, Comparison{Accepted: 1, Found: 1}, c)
	assert.True(t, c.Holds())

	putOrder(t, pool, sale, accepted(1), l.user(1), "rejected")
	for buyer, status := range []string{6: "voided", 7: "cancelled", 8: "expired", 9: "paid"} {
		if status != "" {
			putOrder(t, pool, sale, accepted(buyer), l.user(buyer), status)
		}
	}
	putOrder(t, pool, sale, accepted(2), "somebody else", "confirmed")
	accepted(3) // and not in Postgres
	*l.at(click{buyer: 4}) = clickRecord{Outcome: unknown}
	putOrder(t, pool, sale, uuid.New(), l.user(4), "confirmed")
	*l.at(click{buyer: 5}) = clickRecord{Outcome: soldOut}
	putOrder(t, pool, sale, uuid.New(), l.user(5), "confirmed")
	c, err = books.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Len(t, c.Examples, 3)
	c.Examples = nil
	assert.Equal(t, Comparison{
		Accepted: 8, Found: 2, Refused: 1, Voided: 1, Cancelled: 1, Expired: 1, Missing: 1, Altered: 1, Strangers: 1,
		Recovered: 1,
	}, c)
	assert.Equal(t, "8 accepted, 2 of them found, 1 refused later, 1 voided, 1 cancelled, 1 expired, "+
		"1 without an answer, found, 1 missing, 1 altered, 1 unknown to the crowd", c.String())
	assert.False(t, c.Holds())
}

func TestDurableIsMeasuredUntilTheLastOrderArrives(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	books, err := OpenPostgresBooks(t.Context(), pool, sale)
	require.NoError(t, err)
	c := send(t, Config{URLs: []string{openShop(t, &shop{stock: 10})}, Buyers: 20})

	arrive := func(sold int) {
		_, err := pool.Exec(t.Context(), `UPDATE sales SET sold = $2 WHERE id = $1`, sale, sold)
		require.NoError(t, err)
	}
	arrive(9)
	short, err := c.WatchDurable(t.Context(), books, 50*time.Millisecond)
	require.NoError(t, err)
	assert.Equal(t, 9, short.Orders, "an order that does not come is not waited for without end")
	assert.Equal(t, "1 accepted orders have not arrived", short.remark(c.Report()))

	arrive(10)
	all, err := c.WatchDurable(t.Context(), books, time.Minute)
	require.NoError(t, err)
	assert.Equal(t, 10, all.Orders)
	assert.Positive(t, all.Rate)
	assert.True(t, all.LastAt.After(c.Report().LastAccepted))
}

// statuses answers what became of orders, as an ingress does to those who show the receipt.
func statuses(t *testing.T, s *shop, of map[string]string) string {
	t.Helper()
	asked := make(map[string]int)
	s.before = func(_ int, w http.ResponseWriter, r *http.Request) bool {
		id, looked := strings.CutPrefix(r.URL.Path, "/v1/orders/")
		if !looked {
			if strings.HasSuffix(r.URL.Path, "/orders") {
				return false
			}
			_, _ = w.Write([]byte(`{"sold":0}`))
			return true
		}
		user := r.Header.Get("X-User-ID")
		s.mu.Lock()
		defer s.mu.Unlock()
		asked[user]++
		status := of[user[strings.LastIndexByte(user, '-')+1:]]
		switch {
		case status == "" || r.URL.Query().Get("receipt") != receiptOf(uuid.MustParse(id)):
			writeProblem(w, http.StatusNotFound, "order-not-found")
		case asked[user] == 1:
			writeProblem(w, http.StatusServiceUnavailable, "sale-unavailable") // not decided yet
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"user_id": user, "quantity": 1, "status": status})
		}
		return true
	}
	return openShop(t, s)
}

func TestEveryOrderIsAskedForWithItsReceipt(t *testing.T) {
	t.Parallel()
	url := statuses(t, &shop{stock: 7}, map[string]string{
		"0": "confirmed", "1": "paid", "2": "rejected", "3": "voided", "4": "cancelled", "5": "expired",
	})
	c, err := New(Config{URLs: []string{url}, Buyers: 7, Sale: uuid.New()})
	require.NoError(t, err)
	books, err := OpenAPIBooks(t.Context(), url, uuid.New(), HeaderAuth("X-User-ID"))
	require.NoError(t, err)
	c.Run(t.Context())
	got, err := books.Compare(t.Context(), c.Ledger())
	require.NoError(t, err)
	assert.Len(t, got.Examples, 1)
	got.Examples = nil
	assert.Equal(t, Comparison{Accepted: 7, Found: 2, Refused: 1, Voided: 1, Cancelled: 1, Expired: 1, Missing: 1}, got)
}

// What Postgres lacks is asked for with its receipt: a lost Redis took it along, and its buyer can be told so.
func TestOrdersThatPostgresLacksAreAskedFor(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := putSale(t, pool)
	url := statuses(t, &shop{stock: 3}, map[string]string{"1": "voided"})
	c, err := New(Config{URLs: []string{url}, Buyers: 3, Sale: sale})
	require.NoError(t, err)
	books, err := OpenPostgresBooks(t.Context(), pool, sale)
	require.NoError(t, err)
	api, err := OpenAPIBooks(t.Context(), url, sale, HeaderAuth("X-User-ID"))
	require.NoError(t, err)
	books.AskToo(api)
	c.Run(t.Context())
	l := c.Ledger()
	putOrder(t, pool, sale, l.at(click{buyer: 0}).Order, l.user(0), "confirmed")
	got, err := books.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, Comparison{
		Accepted: 3, Found: 1, Voided: 1, Missing: 1, Examples: []string{
			"order " + l.at(click{buyer: 2}).Order.String() + " of " + l.user(2) + " came to no end",
		},
	}, got)
	assert.False(t, got.Holds())
}
