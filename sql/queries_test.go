package sql_test

import (
	"context"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
	"stampede/sql/migrate"
)

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
