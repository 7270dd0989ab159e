package sql_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation/order"
)

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
		for _, found := range regexp.MustCompile(`\{\{(columns/[^}]*)\}\}`).FindAllStringSubmatch(withoutComments(t, file), -1) {
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
