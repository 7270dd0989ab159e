package fulfillment_test

import (
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/ledger"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation/order"
)

// TestExpirySkipsContradictoryOrder has an order that is paid by its log and confirmed by its row, one
// whose row is behind its log, and one whose deadline is no time, which can end all the same.
func TestExpirySkipsContradictoryOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale, other := s.OpenPayable(t, 100), s.OpenPayable(t, 100)
	s.Crowd(t, sale, 40)
	s.Crowd(t, other, 10)
	var orders []uuid.UUID
	for _, out := range testwork.Fulfil(s, t) {
		orders = append(orders, out.Event.OrderID)
	}
	testwork.EndWindow(t, s.Pool, orders...)
	paid, behind, timeless := orders[7], orders[23], orders[31]
	for query, order := range map[string]uuid.UUID{
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, now() FROM orders WHERE id = $1`: paid,
		"UPDATE orders SET version = 1 WHERE id = $1":       behind,
		"UPDATE orders SET due = '-infinity' WHERE id = $1": timeless,
	} {
		_, err := s.Pool.Exec(t.Context(), query, order)
		require.NoError(t, err)
	}

	config, log, registry := testwork.Config(s, t), &testshop.CountingLog{}, prometheus.NewRegistry()
	config.Logger, config.Registerer = slog.New(log), registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "all others have expired",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 48 })
	testkit.Eventually(t, testshop.Soon, "the metrics count the two", func() bool {
		return testshop.ValueOf(t, registry, "stampede_orders_set_aside", "") == 2
	})
	stop()
	require.Equal(t, 2, log.Times(ledger.SetAsideMessage), "each is named once")
	for _, o := range []uuid.UUID{paid, behind} {
		require.Equal(t, order.StatusConfirmed, testwork.OrderOfID(t, s.Pool, o).Status)
		require.Contains(t, testwork.TextOf(t, testwork.Audit(s, t, uuid.Nil)), o.String())
	}

	// Mended, they expire.
	for query, order := range map[string]uuid.UUID{
		"DELETE FROM order_events WHERE order_id = $1 AND version = 3": paid,
		"UPDATE orders SET version = 2 WHERE id = $1":                  behind,
	} {
		_, err := s.Pool.Exec(t.Context(), query, order)
		require.NoError(t, err)
	}
	expired, err := testwork.Expire(s, t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, expired)
	require.Zero(t, s.Count(t, testshop.BrokenLogs))
}
