package doctor_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
	"stampede/upkeep/doctor"
)

// withDefaults adds DEFAULT partitions, as operators and pg_partman do to be safe.
func withDefaults(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := testkit.Pool(t)
	execute(t, pool, "CREATE TABLE orders_else PARTITION OF orders DEFAULT; "+
		"CREATE TABLE order_events_else PARTITION OF order_events DEFAULT")
	return pool
}

func execute(t *testing.T, pool *pgxpool.Pool, statements string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), statements, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
	require.NoError(t, err)
}

// saleOf makes a sale of March 2037 with an order, if it has a user, and returns the tables of that order and its
// event.
func saleOf(t *testing.T, pool *pgxpool.Pool, user string) (tables string) {
	t.Helper()
	sale := fmt.Sprintf("01edb000-0000-7000-8000-%012d", len(user))
	execute(t, pool, "INSERT INTO sales (id, name, stock) VALUES ($1::uuid, 'in 2037-03', 1)", sale)
	if user == "" {
		return ""
	}
	execute(t, pool, `INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES ($1::uuid, $1::uuid, $2, 1, 'voided', 2, 1, 1, now(), now())`, sale, user)
	execute(t, pool, `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
		VALUES ($1::uuid, 2, 'OrderVoided', $1::uuid, $2, 1, now())`, sale, user)
	return tablesOf(t, pool, sale)
}

func tablesOf(t *testing.T, pool *pgxpool.Pool, sale string) (tables string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT concat_ws(' ', (SELECT tableoid::regclass FROM orders WHERE sale_id = $1),
		(SELECT tableoid::regclass FROM order_events WHERE sale_id = $1))`, uuid.MustParse(sale)).Scan(&tables))
	return tables
}

func TestMonthsGoOnBesideDefaultPartitions(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	require.Equal(t, "orders_2037_03 order_events_2037_03", saleOf(t, pool, "ann"))
	var taken *string
	require.NoError(t, pool.QueryRow(t.Context(), sql.WorkerMonthsInDefault).Scan(&taken))
	require.Nil(t, taken)
	findings, err := doctor.Postgres(t.Context(), pool)
	require.NoError(t, err)
	assert.Equal(t, []string{
		"warning: order_events_else is a DEFAULT partition of order_events", "warning: orders_else is a DEFAULT partition of orders",
	}, summaries(findings))
}

// Sales of a month whose orders are in a DEFAULT partition go on there, until an operator moves them.
func TestMonthInDefaultPartitionIsMovedByMend(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	execute(t, pool, "ALTER TABLE sales DISABLE TRIGGER make_month")
	require.Equal(t, "orders_else order_events_else", saleOf(t, pool, "ann"))
	execute(t, pool, "ALTER TABLE sales ENABLE TRIGGER make_month")
	require.Equal(t, "orders_else order_events_else", saleOf(t, pool, "bo"), "a sale of the same month")

	for range 2 {
		findings, err := doctor.Postgres(t.Context(), pool)
		require.NoError(t, err)
		require.Contains(t, findings[0].What, "is a DEFAULT partition")
		_, mend, _ := strings.Cut(findings[0].Mend, ": ")
		execute(t, pool, mend)
	}
	findings, err := doctor.Postgres(t.Context(), pool)
	require.NoError(t, err)
	assert.Empty(t, findings)
	for _, sale := range []string{"01edb000-0000-7000-8000-000000000003", "01edb000-0000-7000-8000-000000000002"} {
		assert.Equal(t, "orders_2037_03 order_events_2037_03", tablesOf(t, pool, sale))
	}
}

// A large DEFAULT partition would be locked for as long as it takes to read it.
func TestLargeDefaultPartitionIsNotLocked(t *testing.T) {
	t.Parallel()
	pool := withDefaults(t)
	execute(t, pool, `INSERT INTO orders_else (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		SELECT gen_random_uuid(), '01f00000-0000-7000-8000-000000000000', repeat('x', 1000), 1, 'voided', 2, n, 1, now(), now()
		FROM generate_series(1, 20000) AS n`)
	require.Equal(t, "orders_else order_events_2037_03", saleOf(t, pool, "ann"))
}
