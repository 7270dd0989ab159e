package testshop

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

func RaiseEpoch(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID) {
	t.Helper()
	_, err := pool.Exec(t.Context(), "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
	require.NoError(t, err)
}
