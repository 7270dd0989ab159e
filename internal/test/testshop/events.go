package testshop

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

// NewSale inserts a sale straight into Postgres, for tests that need no Redis.
func NewSale(t testing.TB, pool *pgxpool.Pool, stock int64) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := pool.Exec(t.Context(), "INSERT INTO sales (id, name, stock) VALUES ($1, 'test', $2)", id, stock)
	require.NoError(t, err)
	return id
}

// Reserved makes an event as the script would have appended it.
func Reserved(sale uuid.UUID, user string, sequence int64) order.OrderReserved {
	at := time.UnixMilli(1_790_000_000_000 + sequence).UTC()
	return order.OrderReserved{
		OrderID: order.NewOrderID(sale), SaleID: sale, UserID: user, Quantity: 1, Epoch: 1,
		ReservedAt: at, Sequence: sequence,
	}
}

// CrowdOf makes events of n different users.
func CrowdOf(sale uuid.UUID, n int) []order.OrderReserved {
	events := make([]order.OrderReserved, n)
	for i := range events {
		events[i] = Reserved(sale, fmt.Sprintf("user-%d", i+1), int64(i+1))
	}
	return events
}

func QueryInt(t testing.TB, pool *pgxpool.Pool, query string, args ...any) int64 {
	t.Helper()
	var n int64
	require.NoError(t, pool.QueryRow(t.Context(), query, args...).Scan(&n))
	return n
}

func SoldOf(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) int64 {
	return QueryInt(t, pool, "SELECT sold FROM sales WHERE id = $1", sale)
}

// History is the events of an order as "version type".
func History(t testing.TB, pool *pgxpool.Pool, id uuid.UUID) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), "SELECT version, type FROM order_history WHERE order_id = $1 ORDER BY version",
		id)
	require.NoError(t, err)
	defer rows.Close()
	var all []string
	for rows.Next() {
		var version int
		var kind string
		require.NoError(t, rows.Scan(&version, &kind))
		all = append(all, fmt.Sprintf("%d %s", version, kind))
	}
	require.NoError(t, rows.Err())
	return all
}
