package designs

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/ledger"
	"stampede/reservation/order"
)

// allRows returns the rows of all orders without the columns that differ each time.
func allRows(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	const query = `
		SELECT (to_jsonb(o) - 'updated_at')::text FROM orders AS o
		UNION ALL
		SELECT (to_jsonb(e) - '{position,occurred_at}'::text[])::text FROM order_events AS e
		ORDER BY 1`
	rows, err := pool.Query(t.Context(), query)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

func TestRecordedOrderHasRowsOfLedger(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	o := s.order("alice")
	o.Quantity = 2
	require.NoError(t, recordOrder(t.Context(), s.pool, o, 7))
	ours := allRows(t, s.pool)
	require.Len(t, ours, 2)

	_, err := s.pool.Exec(t.Context(), "TRUNCATE orders, order_events")
	require.NoError(t, err)
	_, err = ledger.New(s.pool).Record(t.Context(), []order.OrderReserved{{
		OrderID: o.ID, SaleID: o.Sale, UserID: o.User, Quantity: o.Quantity,
		Sequence: 7, Epoch: 1, ReservedAt: reservedAt(o.ID),
	}})
	require.NoError(t, err)
	require.Equal(t, allRows(t, s.pool), ours)
}

func TestRecordingOrderTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, true)
	o := s.order("alice")
	require.NoError(t, recordOrder(t.Context(), s.pool, o, unnumbered))
	first := allRows(t, s.pool)
	require.NoError(t, recordOrder(t.Context(), s.pool, o, unnumbered))
	require.Equal(t, first, allRows(t, s.pool))
}
