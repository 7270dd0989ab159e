package testshop

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// PaymentWindow is the payment window of payable sales.
const PaymentWindow = 10 * time.Minute

// NewPayableSale inserts a sale with a payment window straight into Postgres.
func NewPayableSale(t testing.TB, pool *pgxpool.Pool, stock int64) uuid.UUID {
	t.Helper()
	sale := NewSale(t, pool, stock)
	_, err := pool.Exec(t.Context(), "UPDATE sales SET payment_window_seconds = $2 WHERE id = $1", sale,
		int64(PaymentWindow/time.Second))
	require.NoError(t, err)
	return sale
}
