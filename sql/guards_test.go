package sql_test

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
	"stampede/sql/migrate"
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

// queries.go has a variable for each file, in the order of the files, with a name made from its path.
func TestQueriesAreNamedAfterTheirFiles(t *testing.T) {
	t.Parallel()
	files := queryFiles(t)
	source, err := os.ReadFile("queries.go")
	require.NoError(t, err)
	var embedded []string
	declared := regexp.MustCompile(`(?m)^\t(\w+) += query\("(\S+)"\)$`)
	for _, found := range declared.FindAllStringSubmatch(string(source), -1) {
		name, path := found[1], found[2]
		embedded = append(embedded, "queries/"+path+".sql")
		words := strings.NewReplacer("/", "", "_", "").Replace(path)
		require.Equal(t, words, strings.ToLower(name), path)
	}
	require.Equal(t, files, embedded)
}

// queryFiles returns the files of all queries.
func queryFiles(t *testing.T) (files []string) {
	t.Helper()
	require.NoError(t, fs.WalkDir(os.DirFS("."), "queries", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	return files
}

func TestStatementsAreNamedAfterTheirFiles(t *testing.T) {
	t.Parallel()
	for statement, want := range map[string]string{
		sql.LedgerRecordFresh:            "ledger/record_fresh",
		sql.RelayReadOrders:              "relay/read_orders",
		"COMMIT":                         "COMMIT",
		"SET LOCAL lock_timeout = 2000":  "SET",
		"begin; SET LOCAL lock_timeout;": "begin",
		"":                               "",
	} {
		require.Equal(t, want, sql.NameOf(statement))
	}
}

// rightsRig is a database whose tables are in a schema.
type rightsRig struct {
	t                        *testing.T
	server, database, schema string
}

func (r rightsRig) url(role string) string {
	u, err := url.Parse(r.server)
	require.NoError(r.t, err)
	u.User, u.Path = url.User(role), r.database
	u.RawQuery = url.Values{"sslmode": {"disable"}, "search_path": {r.schema}}.Encode()
	return u.String()
}

func (r rightsRig) as(role string) *pgx.Conn {
	r.t.Helper()
	conn, err := pgx.Connect(r.t.Context(), r.url(role))
	require.NoError(r.t, err)
	r.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func execute(t *testing.T, conn *pgx.Conn, statements string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), statements)
	require.NoError(t, err, statements)
}

// Functions with the rights of their owner find no object of their caller, whatever the schema is called, and only
// roles may call them that were given that right.
func TestNobodyGetsRightsOfOwnerByFunction(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t).URL
	outside := rightsRig{t, server, "postgres", "public"}.as("stampede")
	for i, schema := range []string{"public", `"Shop-1"`} {
		r := rightsRig{t, server, fmt.Sprint("rights", i), schema}
		if i == 0 {
			execute(t, outside, `CREATE ROLE owner LOGIN; CREATE ROLE stranger LOGIN; CREATE ROLE till LOGIN; CREATE ROLE feed LOGIN;
				CREATE ROLE clerk LOGIN; CREATE ROLE clerks; GRANT clerks TO clerk;
				CREATE ROLE loader LOGIN; GRANT pg_write_all_data, pg_read_all_data TO loader`)
		}
		execute(t, outside, "CREATE DATABASE "+r.database)
		admin := r.as("stampede")
		execute(t, admin, "CREATE SCHEMA IF NOT EXISTS "+schema+"; GRANT CREATE, USAGE ON SCHEMA "+schema+" TO owner; "+
			"GRANT USAGE ON SCHEMA "+schema+" TO PUBLIC")
		migrator := r.url("owner")
		require.NoError(t, migrate.Up(t.Context(), migrator))
		execute(t, admin, `GRANT INSERT, SELECT ON sales TO till;
			GRANT INSERT (sale_id, revision, type) ON sale_events TO till;
			GRANT SELECT, INSERT ON orders TO clerks; GRANT SELECT ON relay_targets TO feed;
			GRANT EXECUTE ON FUNCTION make_month(uuid), next_position() TO till;
			GRANT EXECUTE ON FUNCTION make_month(uuid) TO clerks; GRANT EXECUTE ON FUNCTION newest_position() TO feed`)

		rows, err := admin.Query(t.Context(), `SELECT concat(oid::regprocedure, ' ', proconfig, ' ', proacl) FROM pg_proc
			WHERE prosecdef AND pronamespace::regnamespace::text !~ '^(pg_|information_schema)'
			  AND (proconfig IS DISTINCT FROM ARRAY[format('search_path=%s, pg_temp', pronamespace::regnamespace)]
			       OR has_function_privilege('public', oid, 'EXECUTE'))`)
		require.NoError(t, err)
		unsafe, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Empty(t, unsafe, "a function with SECURITY DEFINER needs exactly the search_path <its schema>, pg_temp, and "+
			"REVOKE EXECUTE … FROM PUBLIC")

		const sale = "019ac000-0000-7000-8000-000000000000"
		calls := map[string]string{
			"make_month(uuid)":  "SELECT make_month('" + sale + "')",
			"next_position()":   "SELECT next_position()",
			"newest_position()": "SELECT newest_position()",
		}
		may := map[string][]string{
			"till": {"make_month(uuid)", "next_position()"}, "clerk": {"make_month(uuid)"}, "feed": {"newest_position()"},
			"loader": {"make_month(uuid)", "next_position()", "newest_position()"}, "stranger": nil,
		}
		for role, allowed := range may {
			conn := r.as(role)
			_, err := conn.Exec(t.Context(), `CREATE FUNCTION pg_temp.evil() RETURNS uuid LANGUAGE plpgsql AS $$ BEGIN
				IF current_user <> session_user THEN
					EXECUTE format('GRANT ALL ON ALL TABLES IN SCHEMA %I TO %I', current_schema(), session_user);
				END IF;
				RETURN '00000000-0000-0000-0000-000000000000'; END $$;
				CREATE TEMP VIEW order_months AS SELECT pg_temp.evil() AS first,
					'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid AS until, 1 AS orders, 1 AS events;
				CREATE TEMP VIEW order_events_position_seq AS
					SELECT pg_temp.evil() IS NOT NULL AS is_called, 1::bigint AS last_value;
				CREATE TEMP VIEW sales AS SELECT pg_temp.evil() AS id, now() AS archived_at, NULL AS archive;
				GRANT SELECT ON order_months, order_events_position_seq, sales TO PUBLIC`)
			require.NoError(t, err)
			for function, call := range calls {
				_, err := conn.Exec(t.Context(), call)
				if slices.Contains(allowed, function) {
					require.NoError(t, err, "%s %s", role, function)
				} else {
					require.ErrorContains(t, err, "permission denied for function", "%s %s", role, function)
				}
			}
			var stolen bool
			require.NoError(t, admin.QueryRow(t.Context(), "SELECT has_table_privilege($1, 'receipt_key', 'TRUNCATE')",
				role).Scan(&stolen))
			require.False(t, stolen, role)
		}
		execute(t, r.as("till"), "INSERT INTO sales (id, name, stock) VALUES ('"+sale+"', 'autumn', 1); "+
			"INSERT INTO sale_events (sale_id, revision, type) VALUES ('"+sale+"', 1, 'SaleCreated')")
	}
}

// ON CONFLICT without its columns takes a row in a table whose key is not there yet, as while a dump is restored: the
// key cannot be made afterwards. With its columns the statement fails until the key exists.
func TestConflictsNameTheirColumns(t *testing.T) {
	t.Parallel()
	for _, file := range queryFiles(t) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NotRegexp(t, `(?i)\n[^-\n]*ON CONFLICT\s+DO`, "\n"+string(text), file)
	}
}
