package testwork

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/reservation/order"
)

// Confirm records orders of n users, user-1 first, and returns their ids.
func Confirm(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID, n int) []uuid.UUID {
	t.Helper()
	events := testshop.CrowdOf(sale, n)
	outcomes, err := ledger.New(pool).Record(t.Context(), events)
	require.NoError(t, err)
	ids := make([]uuid.UUID, n)
	for i, out := range outcomes {
		require.Equal(t, order.StatusConfirmed, out.Status)
		ids[i] = out.Event.OrderID
	}
	return ids
}

// Heartbeat records that an ingress runs.
func Heartbeat(t testing.TB, pool *pgxpool.Pool) (outage time.Duration) {
	t.Helper()
	outage, err := ledger.Heartbeat{Pool: pool, Logger: testkit.Logger(t)}.Send(t.Context())
	require.NoError(t, err)
	return outage
}

// EndWindow moves the payment deadlines of these orders into the past, by more than the outage that a busy machine may
// cause meanwhile.
func EndWindow(t testing.TB, pool *pgxpool.Pool, orders ...uuid.UUID) {
	t.Helper()
	Heartbeat(t, pool) // may record an outage
	require.NoError(t, MoveDue(t.Context(), pool, "pay_clock() - interval '1 min'", orders...))
	Heartbeat(t, pool)
}

// MoveDue sets the payment deadlines of these orders to an expression of SQL, in their rows and in their log.
func MoveDue(ctx context.Context, pool *pgxpool.Pool, due string, orders ...uuid.UUID) error {
	tag, err := pool.Exec(ctx, `
		WITH moved AS (UPDATE orders SET due = `+due+` WHERE id = ANY ($1) RETURNING sale_id, id, due)
		UPDATE order_events AS e SET due = moved.due FROM moved
		WHERE e.sale_id = moved.sale_id AND order_id = id AND version = 2`, orders)
	if err == nil && tag.RowsAffected() != int64(len(orders)) {
		err = fmt.Errorf("%d of %d deadlines were moved", tag.RowsAffected(), len(orders))
	}
	return err
}

func OrderOfID(t testing.TB, pool *pgxpool.Pool, id uuid.UUID) order.Order {
	t.Helper()
	o, err := ledger.New(pool).Order(t.Context(), id)
	require.NoError(t, err)
	return o
}
