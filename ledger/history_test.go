package ledger_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// The log has a row for the reservation of an order and its outcome, and the view order_history a row for each event.
func TestHistoryShowsEveryEventOfOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	testwork.Heartbeat(t, pool)
	paid, cancelled := testshop.Reserved(sale, "ann", 1), testshop.Reserved(sale, "bob", 2)
	second, refused := testshop.Reserved(sale, "ann", 3), testshop.Reserved(sale, "cid", 4)
	late := testshop.Reserved(sale, "dan", 5)
	paid.KeyFingerprint = "AAAAAAAAAAAAAAAAAAAAAA"
	_, err := l.Record(t.Context(), []order.OrderReserved{paid, cancelled, second})
	require.NoError(t, err)
	_, err = l.Pay(t.Context(), paid.OrderID, "ann", "pi_1")
	require.NoError(t, err)
	_, err = l.Cancel(t.Context(), cancelled.OrderID, "bob")
	require.NoError(t, err)
	_, err = l.Refuse(t.Context(), []order.OrderReserved{refused}, order.RejectedSoldOut)
	require.NoError(t, err)
	testshop.RaiseEpoch(t, pool, sale)
	_, err = l.Record(t.Context(), []order.OrderReserved{late})
	require.NoError(t, err)

	for _, c := range []struct {
		event order.OrderReserved
		want  []string
	}{
		{paid, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 1, "key_fingerprint": "AAAAAAAAAAAAAAAAAAAAAA"}`,
			`2 OrderConfirmed {"due": true}`, `3 OrderPaid {"reference": "pi_1"}`,
		}},
		{cancelled, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 2}`, `2 OrderConfirmed {"due": true}`, `3 OrderCancelled {}`,
		}},
		{second, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 3}`, `2 OrderRejected {"reason": "already-purchased"}`,
		}},
		{refused, []string{`1 OrderReserved {"epoch": 1, "sequence": 4}`, `2 OrderRejected {"reason": "sold-out"}`}},
		{late, []string{`1 OrderReserved {"epoch": 1, "sequence": 5}`, `2 OrderVoided {"reason": "sale-rebuilt"}`}},
	} {
		require.EqualValues(t, len(c.want)-1, testshop.QueryInt(t, pool,
			"SELECT count(*) FROM order_events WHERE order_id = $1", c.event.OrderID))
		rows, err := pool.Query(t.Context(), `SELECT format('%s %s %s', version, type, data || CASE WHEN data ? 'due'
			THEN jsonb_build_object('due', (data ->> 'due')::timestamptz > now()) ELSE '{}' END),
			sale_id, user_id, quantity, occurred_at FROM order_history WHERE order_id = $1 ORDER BY version`, c.event.OrderID)
		require.NoError(t, err)
		var events []string
		for rows.Next() {
			var event, user string
			var of uuid.UUID
			var quantity int64
			var at time.Time
			require.NoError(t, rows.Scan(&event, &of, &user, &quantity, &at))
			require.Equal(t, []any{sale, c.event.UserID, int64(1)}, []any{of, user, quantity})
			require.Equal(t, len(events) == 0, at.Equal(c.event.ReservedAt), "only the reservation has its time")
			events = append(events, event)
		}
		require.NoError(t, rows.Err())
		require.Equal(t, c.want, events)
	}
}
