package sql_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
)

var update = flag.Bool("update", false, "write guards.txt from a migrated database")

// existingGuards returns the guards of the database as lines of guards.txt.
func existingGuards(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	query, err := os.ReadFile("queries/schema/guards.sql")
	require.NoError(t, err)
	rows, _ := pool.Query(t.Context(),
		"SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND "+
			"NOT relispartition AND relname <> 'goose_db_version'")
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	rows, _ = pool.Query(t.Context(), string(query), tables)
	var table, kind, name, definition, trouble string
	var lines []string
	_, err = pgx.ForEachRow(rows, []any{&table, &kind, &name, &definition, &trouble}, func() error {
		require.Empty(t, trouble)
		if kind == "month" {
			return nil // their names depend on the time of the migration
		}
		lines = append(lines, strings.Join([]string{table, kind, name, definition}, " | "))
		return nil
	})
	require.NoError(t, err)
	return lines
}

// guards.txt lists exactly the guards that the migrations create.
func TestGuardsMatchMigrations(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	made := existingGuards(t, pool)
	if *update {
		require.NoError(t, os.WriteFile("guards.txt", []byte(strings.Join(made, "\n")+"\n"), 0o644))
	}
	listed, err := os.ReadFile("guards.txt")
	require.NoError(t, err)
	require.Equal(t, made, strings.Split(strings.TrimSpace(string(listed)), "\n"),
		"a migration has changed a constraint or an index: run `go test ./sql -run TestGuardsMatchMigrations -update`")
	wanted, missing, err := sql.Guards(t.Context(), pool)
	require.NoError(t, err)
	require.Len(t, made, wanted)
	require.Empty(t, missing)
}

// Every dropped guard is reported, and the reported SQL restores it.
func TestGuardsReportMissingObjectsWithSQL(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	made := existingGuards(t, pool)
	require.NotEmpty(t, made)
	for _, line := range made {
		g := strings.SplitN(line, " | ", 4)
		table, kind, name := g[0], g[1], g[2]
		if kind == "column" && strings.Contains(strings.Join(made, "\n"),
			table+" | constraint | "+table+"_pkey | PRIMARY KEY (") {
			var key bool
			require.NoError(t, pool.QueryRow(t.Context(),
				`SELECT EXISTS (SELECT FROM pg_constraint JOIN pg_attribute ON attrelid = conrelid AND attnum = ANY (conkey)
				WHERE contype = 'p' AND conrelid = $1::regclass AND attname = $2) OR EXISTS (SELECT FROM pg_attribute WHERE
				attrelid = $1::regclass AND attname = $2 AND attidentity <> '')`, table, name).Scan(&key))
			if key {
				continue // it is dropped and restored with the constraint
			}
		}
		t.Log(line)
		drop := map[string]string{
			"constraint":   "ALTER TABLE " + table + " DROP CONSTRAINT " + name + " CASCADE",
			"unique index": "DROP INDEX " + name,
			"index":        "DROP INDEX " + name,
			"column":       "ALTER TABLE " + table + " ALTER COLUMN " + name + " DROP NOT NULL",
		}[kind]
		_, err := pool.Exec(t.Context(), drop)
		require.NoError(t, err)
		_, missing, err := sql.Guards(t.Context(), pool)
		require.NoError(t, err)
		require.NotEmpty(t, missing)
		require.Equal(t, name, missing[len(missing)-1].Name)
		require.Equal(t, table, missing[len(missing)-1].Table)
		require.Equal(t, kind == "index", missing[len(missing)-1].ForSpeed)
		restoreGuards(t, pool)
		require.Equal(t, made, existingGuards(t, pool))
	}
}

// restoreGuards runs the reported SQL: keys before the foreign keys that refer to them.
func restoreGuards(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for {
		_, missing, err := sql.Guards(t.Context(), pool)
		require.NoError(t, err)
		if len(missing) == 0 {
			return
		}
		// CONCURRENTLY must be a statement of its own.
		for statement := range strings.SplitSeq(missing[len(missing)-1].Mend, "; ") {
			_, err = pool.Exec(t.Context(), statement)
			require.NoError(t, err, statement)
		}
	}
}

// A guard that exists but does not exclude wrong rows is reported like a missing one.
func TestGuardsReportInvalidObjects(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage     []string
		what, mend string
	}{
		"different check": {
			[]string{
				"ALTER TABLE sales DROP CONSTRAINT sales_not_oversold",
				"ALTER TABLE sales ADD CONSTRAINT sales_not_oversold CHECK (sold >= 0)",
			},
			"the constraint sales_not_oversold of the table sales differs: CHECK ((sold >= 0))",
			"ALTER TABLE sales DROP CONSTRAINT sales_not_oversold; ALTER TABLE sales ADD CONSTRAINT sales_not_oversold CHECK " +
				"(((sold >= 0) AND (sold <= stock)));",
		},
		"check not valid for old rows": {
			[]string{
				"ALTER TABLE sales DROP CONSTRAINT sales_not_oversold",
				"ALTER TABLE sales ADD CONSTRAINT sales_not_oversold CHECK (sold BETWEEN 0 AND stock) NOT VALID",
			},
			"the constraint sales_not_oversold of the table sales is NOT VALID",
			"ALTER TABLE sales VALIDATE CONSTRAINT sales_not_oversold;",
		},
		"index not unique": {
			[]string{
				"DROP INDEX orders_one_live_per_user",
				"CREATE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid')",
			},
			"the unique index orders_one_live_per_user of the table orders differs: CREATE INDEX " +
				"orders_one_live_per_user ON ONLY orders",
			"DROP INDEX orders_one_live_per_user; CREATE UNIQUE INDEX orders_one_live_per_user ON ONLY orders",
		},
		"index of fewer orders": {
			[]string{
				"DROP INDEX orders_one_live_per_user",
				"CREATE UNIQUE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status = 'paid'",
			},
			"differs",
			"; CREATE UNIQUE INDEX CONCURRENTLY orders_2028_10_one_live_per_user ON orders_2028_10 USING btree (user_id, sale_id) " +
				"WHERE (status = ANY (ARRAY['confirmed'::text, 'paid'::text])); ALTER INDEX orders_one_live_per_user ATTACH " +
				"PARTITION orders_2028_10_one_live_per_user;",
		},
		"index invalid": {
			[]string{"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'releases_due'::regclass"},
			"the index releases_due of the table releases is INVALID",
			"REINDEX INDEX CONCURRENTLY releases_due;",
		},
		"index invalid in a month": {
			[]string{"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'orders_2028_10_one_live_per_user'::regclass"},
			"the unique index orders_one_live_per_user of the table orders is INVALID in orders_2028_10_one_live_per_user",
			"REINDEX INDEX CONCURRENTLY orders_2028_10_one_live_per_user;",
		},
		"index lacks the months": {
			[]string{
				"DROP INDEX orders_due",
				"CREATE INDEX orders_due ON ONLY orders (sale_id, due) WHERE status = 'confirmed' AND due IS NOT NULL",
			},
			"the index orders_due of the table orders is INVALID",
			"DROP INDEX orders_due; CREATE INDEX orders_due ON ONLY orders",
		},
		"primary key invalid in a month": {
			[]string{"UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'order_events_2028_10_pkey'::regclass"},
			"the constraint order_events_pkey of the table order_events is INVALID in order_events_2028_10_pkey",
			"REINDEX INDEX CONCURRENTLY order_events_2028_10_pkey;",
		},
		"month of a sale missing": {
			[]string{"DROP TABLE orders_2028_10"},
			"the table orders has no part for the sales of 2028-10",
			"SELECT make_month('",
		},
		"primary key deferrable": {
			[]string{
				"ALTER TABLE order_events DROP CONSTRAINT order_events_pkey",
				"ALTER TABLE order_events ADD CONSTRAINT order_events_pkey PRIMARY KEY (sale_id, order_id, version) DEFERRABLE",
			},
			"the constraint order_events_pkey of the table order_events differs: PRIMARY KEY (sale_id, order_id, version) " +
				"DEFERRABLE",
			"ALTER TABLE order_events DROP CONSTRAINT order_events_pkey; ALTER TABLE order_events ADD CONSTRAINT " +
				"order_events_pkey PRIMARY KEY (sale_id, order_id, version);",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := testkit.Pool(t)
			const sale = "INSERT INTO sales (id, name, stock) VALUES ('01b00000-0000-7000-8000-000000000000', 'in 2028-10', 1)"
			for _, statement := range append([]string{sale}, c.damage...) {
				_, err := pool.Exec(t.Context(), statement)
				require.NoError(t, err)
			}
			_, missing, err := sql.Guards(t.Context(), pool)
			require.NoError(t, err)
			require.Len(t, missing, 1)
			require.Contains(t, missing[0].What, c.what)
			require.Contains(t, missing[0].Mend, c.mend)
			restoreGuards(t, pool)
		})
	}
}

func TestGuardsReportMissingTable(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	_, err := pool.Exec(t.Context(), "DROP TABLE releases")
	require.NoError(t, err)
	_, missing, err := sql.Guards(t.Context(), pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	require.Equal(t, "the table releases is missing", missing[0].What)
}

func TestEachTableIsInTheListOfTables(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/data.md")
	require.NoError(t, err)
	rows, _ := testkit.Pool(t).Query(t.Context(), "SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace "+
		"AND relkind IN ('r', 'p', 'v') AND NOT relispartition AND relname <> 'goose_db_version'")
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	for _, table := range tables {
		require.Regexp(t, `(?m)^\|.*`+"`"+table+"`"+`.*\|.*\|$`, string(page))
	}
}
