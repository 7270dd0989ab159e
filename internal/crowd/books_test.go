package crowd

import (
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
	_, err := pool.Exec(t.Context(), `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
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

	l := newLedger(6, 1)
	accepted := func(buyer int) uuid.UUID {
		id := uuid.New()
		*l.at(click{buyer: buyer}) = Entry{Order: id, Outcome: Accepted}
		return id
	}
	putOrder(t, pool, sale, accepted(0), l.user(0), "confirmed")
	c, err := books.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Equal(t, Comparison{Accepted: 1, Found: 1}, c)
	assert.True(t, c.Holds())

	putOrder(t, pool, sale, accepted(1), l.user(1), "rejected")
	putOrder(t, pool, sale, accepted(2), "somebody else", "confirmed")
	accepted(3) // and not in Postgres
	*l.at(click{buyer: 4}) = Entry{Outcome: Unknown}
	putOrder(t, pool, sale, uuid.New(), l.user(4), "confirmed")
	*l.at(click{buyer: 5}) = Entry{Outcome: SoldOut}
	putOrder(t, pool, sale, uuid.New(), l.user(5), "confirmed")
	c, err = books.Compare(t.Context(), l)
	require.NoError(t, err)
	assert.Len(t, c.Examples, 3)
	c.Examples = nil
	assert.Equal(t, Comparison{Accepted: 4, Found: 1, Refused: 1, Missing: 1, Altered: 1, Strangers: 1, Recovered: 1}, c)
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
