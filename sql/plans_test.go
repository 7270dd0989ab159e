package sql_test

import (
	"context"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/sql"
)

// plan is a query that must use an index and must not read all orders.
type plan struct {
	query string
	args  []any
	want  string
}

func requirePlans(t *testing.T, db interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}, plans map[string]plan,
) {
	t.Helper()
	for name, p := range plans {
		t.Run(name, func(t *testing.T) {
			rows, err := db.Query(t.Context(), "EXPLAIN "+p.query, p.args...)
			require.NoError(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			text := strings.Join(lines, "\n")
			require.Contains(t, text, p.want)
			require.NotContains(t, text, "Seq Scan on orders")
		})
	}
}

// The cost of queries that readers of a sale and workers run often must not grow with the number of
// orders.
func TestFrequentQueriesUseIndexes(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := uuid.Must(uuid.NewV7())
	for _, statement := range []string{
		`INSERT INTO sales (id, name, stock, payment_window_seconds) VALUES ($1, 'autumn', 1000000, 600)`,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due,
			key_fingerprint)
			SELECT gen_random_uuid(), $1, 'user-' || n, n % 3 + 1, CASE WHEN n % 10 = 0 THEN 'paid' WHEN n % 10 = 1 THEN
			'expired' ELSE 'confirmed' END,
				2, n, 1, now(), now(), pay_clock() + make_interval(secs => n), NULL
			FROM generate_series(1, 30000) AS n`,
		`INSERT INTO releases (order_id, sale_id, user_id, quantity)
			SELECT id, sale_id, user_id, quantity FROM orders WHERE status = 'expired' AND sale_id = $1`,
	} {
		_, err := pool.Exec(t.Context(), statement, sale)
		require.NoError(t, err)
	}
	_, err := pool.Exec(t.Context(), "VACUUM (ANALYZE)")
	require.NoError(t, err)
	requirePlans(t, pool, map[string]plan{
		"paid units": {
			sql.CatalogFindSales,
			[]any{[]uuid.UUID{sale}, nil, 1, true},
			"Index Only Scan using orders_paid on orders",
		},
		"overdue orders": {
			sql.LedgerLockOverdue,
			[]any{[]uuid.UUID{}, 500, []uuid.UUID{}},
			"Index Scan using orders_due on orders",
		},
		"live orders of a buyer": {
			sql.LedgerOrdersOfUser,
			[]any{"user-5", nil, 20},
			"Index Scan using orders_one_live_per_user on orders",
		},
		"ended orders of a buyer": {
			sql.LedgerOrdersOfUser,
			[]any{"user-5", nil, 20},
			"Index Scan using orders_ended_of_user on orders",
		},
		"refused releases": {sql.LedgerPendingReleases, []any{10000}, "Scan using releases_refused on releases"},
		"due releases":     {sql.LedgerTakeReleases, []any{[]uuid.UUID{}, 500}, "Index Scan using releases_"},
		"ended orders":     {sql.RebuildEndedOrders, []any{sale}, "Index Only Scan using orders_ended on orders"},
		"order with its deadline": {
			sql.LedgerFindOrders,
			[]any{[]uuid.UUID{sale}},
			"Index Scan using orders_pkey on orders",
		},
		"order to pay": {sql.LedgerLockOrder, []any{sale, "user-5"}, "Index Scan using orders_pkey on orders"},
	})

	var final int64
	rows, err := pool.Query(t.Context(), sql.CatalogFindSales, []uuid.UUID{sale}, nil, 1, true)
	require.NoError(t, err)
	values, err := pgx.CollectOneRow(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
	require.NoError(t, err)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT sum(quantity) FROM orders WHERE status = 'paid'").Scan(&final))
	require.Equal(t, final, values[len(values)-1])
}

// A rebuild, a recount or an audit of one sale finds its live orders without reading those of other sales.
func TestQueriesOfSaleReadItsOrdersOnly(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release() // with the temporary table
	sale := uuid.Must(uuid.NewV7())
	for _, statement := range []string{
		`INSERT INTO sales (id, name, stock)
			SELECT CASE n WHEN 1 THEN $1::uuid ELSE gen_random_uuid() END, 'autumn', 1000 FROM generate_series(1, 100) AS n`,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
			SELECT gen_random_uuid(), id, 'user-' || n, 1, CASE WHEN n % 10 = 0 THEN 'expired' ELSE 'confirmed' END,
				2, n, 1, now(), now()
			FROM generate_series(1, 300) AS n, sales WHERE $1::uuid IS NOT NULL`,
		`CREATE TEMP TABLE audit_sales AS SELECT id AS sale_id, true AS present, 300 AS places FROM sales WHERE id = $1`,
	} {
		_, err := conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol, sale)
		require.NoError(t, err)
	}
	_, err = conn.Exec(t.Context(), "VACUUM (ANALYZE)")
	require.NoError(t, err)
	const want = "Scan on orders_live"
	requirePlans(t, conn, map[string]plan{
		"holders":         {sql.RebuildHolders, []any{sale}, want},
		"next epoch":      {sql.RebuildRaiseEpoch, []any{sale, 0, 1, "server", 1}, want},
		"recount":         {sql.ProjectionRecount, []any{sale, 0}, want},
		"two live orders": {sql.AuditTwoLiveOrders, nil, want},
	})
}
