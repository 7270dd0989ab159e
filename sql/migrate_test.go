package sql_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/sql"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestUpSatisfiesCheck(t *testing.T) {
	t.Parallel()
	url, pool := emptyDatabase(t)
	err := sql.Check(t.Context(), pool)
	require.ErrorIs(t, err, sql.ErrNotMigrated)
	require.ErrorContains(t, err, "run `stampede migrate up`")

	begun := time.Now().Add(-time.Minute) // the server's clock may differ
	require.NoError(t, sql.Up(t.Context(), url))
	require.NoError(t, sql.Check(t.Context(), pool))
	for _, m := range status(t, url) {
		require.True(t, m.Applied, m.Name)
		require.True(t, m.AppliedAt.After(begun), m.Name)
	}
	require.NoError(t, sql.Up(t.Context(), url), "a repeat changes nothing")
	require.NoError(t, sql.Check(t.Context(), pool))
}

func TestConcurrentUp(t *testing.T) {
	t.Parallel()
	url, pool := emptyDatabase(t)
	var all errgroup.Group
	for range 4 {
		all.Go(func() error { return sql.Up(context.Background(), url) })
	}
	require.NoError(t, all.Wait())
	require.NoError(t, sql.Check(t.Context(), pool))
	var twice int
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT count(*) - count(DISTINCT version_id) FROM goose_db_version").Scan(&twice))
	require.Zero(t, twice)
}

func TestDownRevertsOneStep(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	all := status(t, url)
	for left := len(all) - 1; left >= 0; left-- {
		require.NoError(t, sql.Down(t.Context(), url))
		require.ErrorIs(t, sql.Check(t.Context(), pool), sql.ErrNotMigrated)
		for i, m := range status(t, url) {
			require.Equal(t, i < left, m.Applied, m.Name)
			require.Equal(t, m.Applied, !m.AppliedAt.IsZero())
		}
	}
	require.ErrorIs(t, sql.Down(t.Context(), url), sql.ErrNothingToUndo)
	require.NoError(t, sql.Up(t.Context(), url), "up after down")
	require.NoError(t, sql.Check(t.Context(), pool))
}

// An interrupted migration of the indexes of live orders is repeated.
func TestUpRepeatsInterruptedIndexes(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	const liveOrders = 8
	for status(t, url)[liveOrders-1].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	for _, statement := range []string{
		"CREATE UNIQUE INDEX orders_one_live_next ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid')",
		"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'orders_one_live_next'::regclass",
		"CREATE INDEX orders_live ON orders (sale_id)",
		"DROP INDEX orders_of_user",
	} {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, sql.Up(t.Context(), url))
	_, missing, err := sql.Guards(t.Context(), pool)
	require.NoError(t, err)
	require.Empty(t, missing)
}

// Migration 00009 joins the reservation of an order and its outcome in one row, and its reversal separates them.
func TestMigrationsKeepLogOfOrders(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	const oneRow = 9
	for status(t, url)[oneRow-1].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	const sale = "00000000-0000-7000-8000-00000000000"
	_, err := pool.Exec(t.Context(), `INSERT INTO order_events
		(order_id, version, type, sale_id, user_id, quantity, occurred_at, data)
		SELECT ($1 || n)::uuid, version, 'Order' || type, ($1 || 0)::uuid, 'user-' || n, n, at::timestamptz, data::jsonb FROM (VALUES
		(1, 1, 'Reserved', '2026-11-22 10:00:00.001', '{"sequence": 7, "epoch": 2, "key_fingerprint": "abc"}'),
		(1, 2, 'Confirmed', '2026-11-22 10:00:01', '{"due": "2026-11-22T10:10:00+00:00"}'),
		(1, 3, 'Paid', '2026-11-22 10:00:02', '{"reference": "pi_1"}'),
		(2, 1, 'Reserved', '2026-11-22 10:00:00.002', '{"sequence": 8, "epoch": 2}'),
		(2, 2, 'Rejected', '2026-11-22 10:00:03', '{"reason": "already-purchased"}'),
		(3, 1, 'Reserved', '2026-11-22 10:00:00.003', '{"sequence": 9, "epoch": 2}'),
		(3, 2, 'Confirmed', '2026-11-22 10:00:04', '{}'),
		(4, 1, 'Reserved', '2026-11-22 10:00:00.004', '{"sequence": 10, "epoch": 2}'),
		(5, 2, 'Confirmed', '2026-11-22 10:00:05', '{}'),
		(6, 1, 'Reserved', '2026-11-22 10:00:00.006', '{"sequence": 11, "epoch": 2}'),
		(6, 3, 'Paid', '2026-11-22 10:00:06', '{}')
		) AS v (n, version, type, at, data)`, sale)
	require.NoError(t, err)
	const columns = "(to_jsonb(e) - 'position')::text"
	rows := func(query string) []string {
		t.Helper()
		found, err := pool.Query(t.Context(), query+" ORDER BY order_id, version")
		require.NoError(t, err)
		texts, err := pgx.CollectRows(found, pgx.RowTo[string])
		require.NoError(t, err)
		return texts
	}
	before := rows("SELECT " + columns + " FROM order_events AS e")
	require.Len(t, before, 11)

	require.NoError(t, sql.Up(t.Context(), url))
	require.Equal(t, before, rows("SELECT "+columns+" FROM order_history AS e"), "the view shows each event")
	require.Equal(t, []string{
		`1 2 OrderConfirmed 10:00:00.001 10:00:01 {"due": "2026-11-22T10:10:00+00:00", "epoch": 2, "sequence": 7, ` +
			`"key_fingerprint": "abc"}`,
		`1 3 OrderPaid  10:00:02 {"reference": "pi_1"}`,
		`2 2 OrderRejected 10:00:00.002 10:00:03 {"epoch": 2, "reason": "already-purchased", "sequence": 8}`,
		`3 2 OrderConfirmed 10:00:00.003 10:00:04 {"epoch": 2, "sequence": 9}`,
		`4 2 OrderReserved 10:00:00.004 10:00:00.004 {"epoch": 2, "sequence": 10}`,
		`5 2 OrderConfirmed  10:00:05 {}`,
		`6 2 OrderReserved 10:00:00.006 10:00:00.006 {"epoch": 2, "sequence": 11}`,
		`6 3 OrderPaid  10:00:06 {}`,
	}, rows(`SELECT format('%s %s %s %s %s %s', quantity, version, type, reserved_at::time, occurred_at::time, data)
		FROM order_events`), "the first row of an order has both times")

	for status(t, url)[oneRow-1].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	require.Equal(t, before, rows("SELECT "+columns+" FROM order_events AS e"))
	require.NoError(t, sql.Up(t.Context(), url))
	require.Equal(t, before, rows("SELECT "+columns+" FROM order_history AS e"))
}

func TestDownKeepsSalesUnlessForced(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	_, err := pool.Exec(t.Context(),
		"INSERT INTO sales (id, name, stock) VALUES ('019b0000-0000-7000-8000-000000000000', 'autumn', 1)")
	require.NoError(t, err)
	require.ErrorIs(t, sql.Down(t.Context(), url), sql.ErrHoldsSales)
	require.NoError(t, sql.Check(t.Context(), pool), "nothing was undone")
	require.NoError(t, sql.DownWithData(t.Context(), url))
	require.ErrorIs(t, sql.Check(t.Context(), pool), sql.ErrNotMigrated)
}

// The migration that makes months is not undone while the tables of a detached month would be in its way.
func TestDownWaitsForDetachedMonths(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	exec := func(statement string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	var part, bounds string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT events, format('FROM (%L) TO (%L)', first, until) FROM order_months
		ORDER BY first DESC LIMIT 1`).Scan(&part, &bounds))
	exec("ALTER TABLE orders DETACH PARTITION orders_first")
	exec("ALTER TABLE order_events DETACH PARTITION " + part)
	const months = 9 // the index of migration 10
	for status(t, url)[months+1].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	for _, down := range []func(context.Context, string) error{sql.Down, sql.DownWithData} {
		err := down(t.Context(), url)
		require.ErrorIs(t, err, sql.ErrDetachedMonths)
		require.ErrorContains(t, err, part+", orders_first")
		require.True(t, status(t, url)[months].Applied, "nothing was undone")
	}
	exec("DROP TABLE orders_first")
	exec("ALTER TABLE order_events ATTACH PARTITION " + part + " FOR VALUES " + bounds)
	for status(t, url)[0].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	require.NoError(t, sql.Up(t.Context(), url))
}

func TestStatusListsMigrations(t *testing.T) {
	t.Parallel()
	first := status(t, testkit.DatabaseURL(t))[0]
	require.EqualValues(t, 1, first.Version)
	require.Equal(t, "00001_orders", first.Name)
}

// A process of this version runs beside newer ones, on their schema.
func TestCheckAcceptsNewerSchemaUntilItIsContracted(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	exec := func(statement string, args ...any) {
		t.Helper()
		_, err := pool.Exec(t.Context(), statement, args...)
		require.NoError(t, err)
	}
	all := status(t, url)
	last := all[len(all)-1].Version
	exec("INSERT INTO goose_db_version (version_id, is_applied) VALUES (99999, true), (88888, true)")
	newer, err := sql.Compare(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, []int64{88888, 99999}, newer)
	require.NoError(t, sql.Check(t.Context(), pool))
	require.NoError(t, sql.Up(t.Context(), url), "it has nothing to add")
	names := status(t, url)[len(all):]
	require.Len(t, names, 2, "migrate status names them")
	require.Equal(t, "88888 of a newer version", names[0].Name)
	require.False(t, names[0].AppliedAt.IsZero())

	exec(contractsTable)
	require.NoError(t, sql.Check(t.Context(), pool), "nothing was removed yet")
	exec("INSERT INTO schema_contracts (migration, works_from, release) VALUES (88888, $1, 'v1.2.0')", last)
	require.NoError(t, sql.Check(t.Context(), pool), "this version does not need what was removed")
	exec("INSERT INTO schema_contracts (migration, works_from, release) VALUES (99999, 88888, 'v1.3.0')")
	err = sql.Check(t.Context(), pool)
	require.ErrorIs(t, err, sql.ErrSchemaAhead)
	require.ErrorContains(t, err, fmt.Sprintf("run v1.3.0 or later (removed by migration 99999; this one knows them up to %d)",
		last))

	exec("DELETE FROM goose_db_version WHERE version_id = $1", last)
	require.ErrorIs(t, sql.Check(t.Context(), pool), sql.ErrNotMigrated, "an older schema is refused in any case")
}

func TestCheckDistinguishesOutageFromOldSchema(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := sql.Check(ctx, pool)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, sql.ErrNotMigrated)
}

func TestInvalidURLIsNotPrinted(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "hunter2", "postgres://user:hunter2/x@host:5432/db"} {
		require.ErrorIs(t, sql.Up(t.Context(), bad), sql.ErrDatabaseURL)
		require.ErrorIs(t, sql.Down(t.Context(), bad), sql.ErrDatabaseURL)
		_, err := sql.Status(t.Context(), bad)
		require.ErrorIs(t, err, sql.ErrDatabaseURL)
		require.NotContains(t, err.Error(), "hunter2")
	}
}

// emptyDatabase returns the URL and a pool of a database without any table.
func emptyDatabase(t *testing.T) (string, *pgxpool.Pool) {
	t.Helper()
	pool := testkit.Pool(t)
	_, err := pool.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
	require.NoError(t, err)
	return testkit.DatabaseURL(t), pool
}

func status(t *testing.T, url string) []sql.Migration {
	t.Helper()
	all, err := sql.Status(t.Context(), url)
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// Migration 00011 gives the existing events of sales positions behind those of orders, in the order of their times, and
// uses an index that operators have created before.
func TestMigrationGivesEventsOfSalesPositions(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	const relay = 11
	for status(t, url)[relay-1].Applied {
		require.NoError(t, sql.Down(t.Context(), url))
	}
	for _, statement := range []string{
		"CREATE INDEX CONCURRENTLY mine ON order_events_first (position)",
		"INSERT INTO sales (id, name, stock) SELECT first_sale(timestamp '2026-11-01' + n * interval '1 day'), n, 1 " +
			"FROM generate_series(1, 2) AS n",
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 2, 'OrderConfirmed', id, 'ann', 1, now() FROM sales`,
		`INSERT INTO sale_events (sale_id, revision, type, occurred_at)
			SELECT id, n, 'SalePaused', timestamptz '2026-11-23' + (name || ' hours')::interval - n * interval '1 minute'
			FROM sales, generate_series(1, 2) AS n ORDER BY n, id DESC`,
	} {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.NoError(t, sql.Up(t.Context(), url))
	_, err := pool.Exec(t.Context(),
		"INSERT INTO sale_events (sale_id, revision, type) SELECT id, 3, 'SaleEnded' FROM sales ORDER BY id LIMIT 1")
	require.NoError(t, err)
	rows, err := pool.Query(t.Context(), `SELECT concat(s.name, '.', e.revision, ' ', e.position)
		FROM sale_events AS e JOIN sales AS s ON s.id = e.sale_id ORDER BY e.position`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"1.2 3", "1.1 4", "2.2 5", "2.1 6", "1.3 7"}, got)
	var indexes int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_indexes
		WHERE tablename = 'order_events_first' AND indexdef LIKE '%(%"position")'`).Scan(&indexes))
	require.Equal(t, 1, indexes, "the one that was there")
}
