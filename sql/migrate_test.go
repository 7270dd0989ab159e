package sql_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/sql/migrate"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestUpSatisfiesCheck(t *testing.T) {
	t.Parallel()
	url, pool := emptyDatabase(t)
	err := sql.Check(t.Context(), pool)
	require.ErrorIs(t, err, sql.ErrNotMigrated)
	require.ErrorContains(t, err, "run `stampede migrate up`")

	begun := time.Now().Add(-time.Minute) // the server's clock may differ
	require.NoError(t, migrate.Up(t.Context(), url))
	require.NoError(t, sql.Check(t.Context(), pool))
	for _, m := range status(t, url) {
		require.True(t, m.Applied, m.Name)
		require.True(t, m.AppliedAt.After(begun), m.Name)
	}
	require.NoError(t, migrate.Up(t.Context(), url), "a repeat changes nothing")
	require.NoError(t, sql.Check(t.Context(), pool))
}

func TestConcurrentUp(t *testing.T) {
	t.Parallel()
	url, pool := emptyDatabase(t)
	var all errgroup.Group
	for range 4 {
		all.Go(func() error { return migrate.Up(context.Background(), url) })
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
		require.NoError(t, migrate.Down(t.Context(), url))
		require.ErrorIs(t, sql.Check(t.Context(), pool), sql.ErrNotMigrated)
		for i, m := range status(t, url) {
			require.Equal(t, i < left, m.Applied, m.Name)
			require.Equal(t, m.Applied, !m.AppliedAt.IsZero())
		}
	}
	require.ErrorIs(t, migrate.Down(t.Context(), url), migrate.ErrNothingToUndo)
	require.NoError(t, migrate.Up(t.Context(), url), "up after down")
	require.NoError(t, sql.Check(t.Context(), pool))
}

// Two draws of an earlier version may have a commitment in common. Both keep their seeds, and no other has it.
func TestCommitmentsOfEarlierDrawsAreUsed(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	for known := true; known; {
		require.NoError(t, migrate.Down(t.Context(), url))
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT to_regclass('draw_commitments') IS NOT NULL").Scan(&known))
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO draws (sale_id, entries_id, kind, parties)
		SELECT gen_random_uuid(), gen_random_uuid(), 'draw', jsonb_build_array(
			jsonb_build_object('name', 'ann', 'commitment', repeat('0a', 32)),
			jsonb_build_object('name', n, 'commitment', repeat(n, 32)))
		FROM unnest('{0b,0c}'::text[]) AS n`)
	require.NoError(t, err)
	require.NoError(t, migrate.Up(t.Context(), url))
	var used []string
	var version int
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT array_agg(left(encode(commitment, 'hex'), 2) ORDER BY commitment) FROM draw_commitments").Scan(&used))
	require.Equal(t, []string{"0a", "0b", "0c"}, used)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT max(version) FROM draws").Scan(&version))
	require.Equal(t, 1, version)
}

func TestDownKeepsSalesUnlessForced(t *testing.T) {
	t.Parallel()
	url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
	_, err := pool.Exec(t.Context(),
		"INSERT INTO sales (id, name, stock) VALUES ('019b0000-0000-7000-8000-000000000000', 'autumn', 1)")
	require.NoError(t, err)
	require.ErrorIs(t, migrate.Down(t.Context(), url), migrate.ErrHoldsSales)
	require.NoError(t, sql.Check(t.Context(), pool), "nothing was undone")
	require.NoError(t, migrate.DownWithData(t.Context(), url))
	require.ErrorIs(t, sql.Check(t.Context(), pool), sql.ErrNotMigrated)
}

func TestStatusListsMigrations(t *testing.T) {
	t.Parallel()
	first := status(t, testkit.DatabaseURL(t))[0]
	require.EqualValues(t, 1, first.Version)
	require.Equal(t, "00001_schema", first.Name)
}

// A database from before the first release is refused, whichever of its migrations it has.
func TestSchemaOfUnreleasedVersionIsRefused(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{
		"before it had months": "DROP VIEW order_months",
		"later":                "CREATE FUNCTION archive_month(month date) RETURNS SETOF text LANGUAGE sql AS 'SELECT NULL'",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, pool := testkit.DatabaseURL(t), testkit.Pool(t)
			_, err := pool.Exec(t.Context(), statement)
			require.NoError(t, err)
			err = sql.Check(t.Context(), pool)
			require.ErrorIs(t, err, sql.ErrUnreleased)
			require.True(t, sql.IsUnfit(err))
			require.ErrorIs(t, migrate.Up(t.Context(), url), sql.ErrUnreleased)
			require.ErrorIs(t, migrate.DownWithData(t.Context(), url), sql.ErrUnreleased)
			_, err = migrate.Status(t.Context(), url)
			require.ErrorIs(t, err, sql.ErrUnreleased)
		})
	}
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
	require.NoError(t, migrate.Up(t.Context(), url), "it has nothing to add")
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
		require.ErrorIs(t, migrate.Up(t.Context(), bad), sql.ErrDatabaseURL)
		require.ErrorIs(t, migrate.Down(t.Context(), bad), sql.ErrDatabaseURL)
		_, err := migrate.Status(t.Context(), bad)
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

func status(t *testing.T, url string) []migrate.Migration {
	t.Helper()
	all, err := migrate.Status(t.Context(), url)
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

// withoutComments returns the SQL of a file.
func withoutComments(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return regexp.MustCompile(`--[^\n]*`).ReplaceAllString(string(text), "")
}

func columnFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("columns/*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// facts are what many queries need: a pattern of each, and the files that may have it.
var facts = []struct {
	name, pattern string
	homes         []string
}{
	{
		"that an order is live: call is_live (migration 00013)",
		`'confirmed'\s*,\s*'paid'|'paid'\s*,\s*'confirmed'|\b(confirmed,\s*paid|paid,\s*confirmed)\b|` +
			`'confirmed'\s+OR\s+[\w.]*status\s*=\s*'paid'|'paid'\s+OR\s+[\w.]*status\s*=\s*'confirmed'`, nil,
	},
	{
		"up to when deadlines are over: call last_overdue (migration 00013)",
		`least\(([\w.]+\.)?seen_at\s*,\s*now\(\)\)\s*-|grace(_seconds)?\b[^,\n]*\*\s*interval|make_interval\([^\n]*grace|` +
			`interval '1 second'\s*\*[^,\n]*grace`, nil,
	},
	{
		"the columns of an order or a sale: write {{columns/order}} or {{columns/sale}}",
		`AS (entry_for|expires_at)\b`,
		[]string{
			"columns/order.sql", "columns/sale.sql", "queries/relay/read_orders.sql", // of an event
			"queries/ledger/lock_overdue.sql", // without what is joined
		},
	},
	{"the columns of a sale: write {{columns/sale}}", `AS (entries_id|waitlist_closed)\b`, []string{"columns/sale.sql"}},
	{
		"the terms of a sale: write {{columns/terms}}", `payment_window_seconds,\s+(\w+\.)?payment_grace_seconds`,
		[]string{"columns/terms.sql"},
	},
}

// What a query needs and others need, too, is written once.
func TestFactsHaveOnePlace(t *testing.T) {
	t.Parallel()
	migrations, err := filepath.Glob("migrations/*.sql")
	require.NoError(t, err)
	defined := slices.IndexFunc(migrations, func(file string) bool {
		return strings.Contains(withoutComments(t, file), "CREATE FUNCTION is_live(")
	})
	require.Positive(t, defined)
	files := slices.Concat(queryFiles(t), columnFiles(t), migrations[defined+1:])
	for _, fact := range facts {
		pattern := regexp.MustCompile(fact.pattern)
		for _, file := range files {
			if !slices.Contains(fact.homes, file) {
				require.Empty(t, pattern.FindString(withoutComments(t, file)), "%s says %s", file, fact.name)
			}
		}
		for _, file := range fact.homes {
			require.Regexp(t, pattern, withoutComments(t, file), "%s: it has no place there any more", file)
		}
		if len(fact.homes) == 0 {
			require.Regexp(t, pattern, withoutComments(t, migrations[defined]))
		}
	}
}

// A list of columns is in a file of its own because several queries return it.
func TestListsOfColumnsAreShared(t *testing.T) {
	t.Parallel()
	used := map[string]int{}
	for _, file := range slices.Concat(queryFiles(t), columnFiles(t)) {
		named := regexp.MustCompile(`\{\{(columns/[^}]*)\}\}`)
		for _, found := range named.FindAllStringSubmatch(withoutComments(t, file), -1) {
			used[found[1]+".sql"]++
		}
	}
	for _, file := range columnFiles(t) {
		require.Greater(t, used[file], 1, file)
		delete(used, file)
	}
	require.Empty(t, used, "no such files")
}

// Go and SQL call the same orders live.
func TestLiveIsThatOfStatus(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	rows, err := pool.Query(t.Context(), `SELECT status, is_live(status) FROM unnest((
		SELECT regexp_matches(pg_get_constraintdef(oid), $$'(\w+)'.*?'(\w+)'.*?'(\w+)'.*?'(\w+)'.*?'(\w+)'.*?'(\w+)'$$)
		FROM pg_constraint WHERE conname = 'orders_status_check' AND conrelid = 'orders'::regclass)) AS status`)
	require.NoError(t, err)
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		var status order.Status
		var live bool
		require.NoError(t, rows.Scan(&status, &live))
		require.Equal(t, status.Live(), live, status)
	}
	require.NoError(t, rows.Err())
	require.Equal(t, 6, n, "all that an order can be in Postgres")
}

// Postgres puts the formulas in the place of their calls: else no index whose condition is one serves a query, and each
// row costs a call. They keep no query from having parallel workers.
func TestFormulasArePutInPlaceOfTheirCalls(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	text := explain(t, pool, `EXPLAIN (VERBOSE, COSTS OFF)
		SELECT is_live(o.status), NOT is_live(o.status), last_overdue(p.seen_at, p.lost, s.payment_grace_seconds)
		FROM orders AS o LEFT JOIN sales AS s ON s.id = o.sale_id LEFT JOIN pulse AS p ON true
		WHERE o.due <= last_overdue(p.seen_at, p.lost, s.payment_grace_seconds) AND is_live(o.status)`)
	require.NotRegexp(t, `is_live|last_overdue`, text)
	var unsafe int
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT count(*) FROM pg_proc WHERE proname IN ('is_live', 'last_overdue') AND proparallel <> 's'").Scan(&unsafe))
	require.Zero(t, unsafe)
}
