package testshop

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// HoldSale locks the sale's row, so that transactions of the sale wait until the returned one is rolled back.
func (s *Shop) HoldSale(t testing.TB, sale uuid.UUID) pgx.Tx {
	t.Helper()
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) })
	_, err = hold.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", sale)
	require.NoError(t, err)
	return hold
}

// TransactionsWaiting returns the number of transactions that wait for a lock.
func (s *Shop) TransactionsWaiting(t testing.TB) int64 {
	t.Helper()
	return s.Count(t,
		"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
}
