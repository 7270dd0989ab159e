package testshop

import (
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// OpenPayable opens a sale with a payment window.
func (s *Shop) OpenPayable(t testing.TB, stock int64) uuid.UUID {
	t.Helper()
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: stock, PerOrderLimit: 10, PaymentWindow: PaymentWindow,
	})
	require.NoError(t, err)
	return sale.ID
}

// Left returns the units left in Redis, or -1 if it has no such field.
func (s *Shop) Left(t testing.TB, sale uuid.UUID) int64 {
	t.Helper()
	left, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "left").Int64()
	if errors.Is(err, redis.Nil) {
		return -1
	}
	require.NoError(t, err)
	return left
}

const (
	PendingReleases = "SELECT count(*) FROM releases"
	ExpiredOrders   = "SELECT count(*) FROM orders WHERE status = 'expired'"
	// BrokenLogs counts orders whose events are not one for each version, or end elsewhere than the order.
	BrokenLogs = `SELECT count(*) FROM orders AS o WHERE (SELECT array_agg(version ORDER BY version) FROM order_history
		WHERE order_id = o.id)
		IS DISTINCT FROM (SELECT array_agg(n) FROM generate_series(1, o.version) AS n)`
)
