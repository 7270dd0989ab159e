package fulfillment_test

import (
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// TestExpirySkipsContradictoryOrder has an order that its log calls paid and its row confirmed, one whose row is behind
// its log, one whose row is ahead of it, and one whose deadline is -infinity, which expires nevertheless.
func TestExpirySkipsContradictoryOrder(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, other := s.OpenPayable(t, 100), s.OpenPayable(t, 100)
	s.Crowd(t, sale, 40)
	s.Crowd(t, other, 10)
	var orders []uuid.UUID
	for _, out := range testwork.Fulfil(t, s) {
		orders = append(orders, out.Event.OrderID)
	}
	testwork.EndWindow(t, s.Pool, orders...)
	paid, behind, ahead, timeless := orders[7], orders[23], orders[27], orders[31]
	for query, id := range map[string]uuid.UUID{
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, now() FROM orders WHERE id = $1`: paid,
		"UPDATE orders SET version = 1 WHERE id = $1":       behind,
		"UPDATE orders SET version = 9 WHERE id = $1":       ahead,
		"UPDATE orders SET due = '-infinity' WHERE id = $1": timeless,
	} {
		require.NoError(t, s.Exec(t, query, id))
	}

	config, log, registry := testwork.Config(t, s), &testshop.CountingLog{}, prometheus.NewRegistry()
	config.Logger, config.Registerer = slog.New(log), registry
	stop := testwork.Work(t, config)
	testkit.Eventually(t, testshop.Soon, "all others have expired",
		func() bool { return s.Count(t, testshop.ExpiredOrders) == 47 })
	testkit.Eventually(t, testshop.Soon, "the metrics count the three contradictory orders", func() bool {
		return testshop.Metric(t, registry, "stampede_orders_set_aside", "") == 3
	})
	stop()
	require.Equal(t, 3, log.Times(ledger.SetAsideMessage), "each is logged once")
	for _, o := range []uuid.UUID{paid, behind, ahead} {
		require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, o).Status)
		require.Contains(t, testwork.Text(t, testwork.Audit(t, s, uuid.Nil)), o.String())
	}

	// They expire after the repair.
	require.NoError(t, s.Exec(t, "DELETE FROM order_events WHERE order_id = $1 AND version = 3", paid))
	testwork.RebuildProjections(t, s)
	expired := testwork.Expire(t, s)
	require.Equal(t, 3, expired)
	require.Zero(t, s.Count(t, testshop.BrokenLogs))
}
