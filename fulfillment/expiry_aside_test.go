package fulfillment_test

import (
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// TestExpirySkipsContradictoryOrder has an order that is paid by its log and confirmed by its row, one
// whose row is behind its log, and one whose deadline is no time, which can end all the same.
func TestExpirySkipsContradictoryOrder(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale, other := s.openPayable(t, 100), s.openPayable(t, 100)
	s.crowd(t, sale, 40)
	s.crowd(t, other, 10)
	var orders []uuid.UUID
	for _, out := range s.fulfil(t) {
		orders = append(orders, out.Event.OrderID)
	}
	endWindow(t, s.pool, orders...)
	paid, behind, timeless := orders[7], orders[23], orders[31]
	for query, order := range map[string]uuid.UUID{
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 3, 'OrderPaid', sale_id, user_id, quantity, now() FROM orders WHERE id = $1`: paid,
		"UPDATE orders SET version = 1 WHERE id = $1":       behind,
		"UPDATE orders SET due = '-infinity' WHERE id = $1": timeless,
	} {
		_, err := s.pool.Exec(t.Context(), query, order)
		require.NoError(t, err)
	}

	config, log, registry := s.config(t), &countingLog{}, prometheus.NewRegistry()
	config.Logger, config.Registerer = slog.New(log), registry
	stop := work(t, config)
	testkit.Eventually(t, soon, "all others have expired", func() bool { return s.count(t, expiredOrders) == 48 })
	testkit.Eventually(t, soon, "the metrics count the two", func() bool {
		return valueOf(t, registry, "stampede_orders_set_aside", "") == 2
	})
	stop()
	require.Equal(t, 2, log.times(fulfillment.SetAside), "each is named once")
	for _, order := range []uuid.UUID{paid, behind} {
		require.Equal(t, reservation.StatusConfirmed, orderOfID(t, s.pool, order).Status)
		require.Contains(t, textOf(t, s.audit(t, uuid.Nil)), order.String())
	}

	// Mended, they expire.
	for query, order := range map[string]uuid.UUID{
		"DELETE FROM order_events WHERE order_id = $1 AND version = 3": paid,
		"UPDATE orders SET version = 2 WHERE id = $1":                  behind,
	} {
		_, err := s.pool.Exec(t.Context(), query, order)
		require.NoError(t, err)
	}
	expired, err := s.expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, expired)
	require.Zero(t, s.count(t, brokenLogs))
}
