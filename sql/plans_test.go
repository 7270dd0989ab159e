package sql_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/sql"
)

// plan is a query that must use an index and must not read all orders.
type plan struct {
	query string
	args  []any
	want  string
	// months is how many months of orders or events it may read; 0 for any number.
	months int
}

// counting fills the queries that count the orders of one sale.
var counting = strings.NewReplacer("{{locked}}", "", "{{counted}}",
	strings.Replace(sql.ProjectionCounted, "{{sales}}", "sale_id = $1", 1))

var monthOf = regexp.MustCompile(` on (?:orders|order_events)_(\d{4}_\d\d)\b`)

type querier interface {
	Query(ctx context.Context, query string, args ...any) (pgx.Rows, error)
}

// explain returns the plan that a statement shows.
func explain(t *testing.T, db querier, statement string, args ...any) string {
	t.Helper()
	rows, err := db.Query(t.Context(), statement, args...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(lines, "\n")
}

// inSession returns a connection on which the statements were run. It is closed with the test.
func inSession(t *testing.T, pool *pgxpool.Pool, statements ...string) *pgx.Conn {
	t.Helper()
	pooled, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	conn := pooled.Hijack()
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	for _, statement := range statements {
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	return conn
}

func requirePlans(t *testing.T, db querier, plans []plan) {
	t.Helper()
	for _, p := range plans {
		t.Run(sql.NameOf(p.query), func(t *testing.T) {
			text := explain(t, db, "EXPLAIN "+counting.Replace(p.query), p.args...)
			require.Regexp(t, p.want, text)
			require.NotRegexp(t, "Seq Scan on (order|payment_events|open_payments)", text)
			months := map[string]bool{}
			for _, m := range monthOf.FindAllStringSubmatch(text, -1) {
				months[m[1]] = true
			}
			if p.months > 0 {
				require.Len(t, months, p.months, text)
			}
		})
	}
}

// saleIn returns the id of a sale that was created at that time.
func saleIn(at time.Time) uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	for i := range 6 {
		id[i] = byte(at.UnixMilli() >> (8 * (5 - i)))
	}
	return id
}

// fourMonths returns a database with five sales in each of four months, each with 2,000 orders, and one of the
// sales, which has overdue orders, releases, and ended orders with a key.
func fourMonths(t *testing.T) (*pgxpool.Pool, uuid.UUID) {
	t.Helper()
	pool := testkit.Pool(t)
	var sales []uuid.UUID
	for month := range 4 {
		for range 5 {
			sales = append(sales, saleIn(time.Date(2031, time.Month(month+1), 7, 0, 0, 0, 0, time.UTC)))
		}
	}
	for _, statement := range []string{
		`INSERT INTO sales (id, name, stock, payment_window_seconds) SELECT unnest($1::uuid[]), 'autumn', 1000000, 600`,
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due,
				key_fingerprint)
			SELECT (left(gen_random_uuid()::text, 32) || right(sale::text, 4))::uuid, sale, 'user-' || n, n % 3 + 1,
				CASE WHEN n % 10 = 0 THEN 'paid' WHEN n % 10 = 1 THEN 'expired' ELSE 'confirmed' END,
				2, n, 1, now(), now(), pay_clock() + make_interval(secs => n - 100), CASE WHEN n % 100 = 1 THEN 'key' || n END
			FROM generate_series(1, 2000) AS n, unnest($1::uuid[]) AS sale`,
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, now() FROM orders WHERE sale_id = ANY ($1)`,
		`INSERT INTO releases (order_id, sale_id, user_id, quantity)
			SELECT id, sale_id, user_id, quantity FROM orders WHERE status = 'expired' AND sale_id = ANY ($1)`,
	} {
		_, err := pool.Exec(t.Context(), statement, sales)
		require.NoError(t, err)
	}
	// Of months without orders all plans are alike.
	for _, statement := range []string{
		"INSERT INTO sales (id, name, stock) SELECT ('01c10000-0000-7' || right(gen_random_uuid()::text, 21))::uuid, " +
			"'none', 1 FROM generate_series(1, 2000)",
		`DO $$ DECLARE part text; BEGIN
			FOR part IN SELECT unnest(ARRAY[orders, events]) FROM order_months WHERE first < first_sale('2031-01-01') LOOP
				EXECUTE 'DROP TABLE ' || part;
			END LOOP;
		END $$`,
		`INSERT INTO payment_events (reference, version, type, order_id)
			SELECT 'pi_' || n, version, CASE WHEN version = 1 THEN 'PaymentReceived' WHEN n % 2 = 0 THEN 'PaymentRefundDue'
				ELSE 'PaymentSettled' END, gen_random_uuid() FROM generate_series(1, 5000) AS n, generate_series(1, 2) AS version`,
		"VACUUM (ANALYZE)",
	} {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	return pool, sales[7]
}

// plansFor are the queries that read or change orders, for those of one sale or one user. The month of a given sale is
// the only one that they read.
func plansFor(t *testing.T, pool *pgxpool.Pool, sale uuid.UUID) []plan {
	t.Helper()
	var id uuid.UUID
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT id FROM orders WHERE sale_id = $1 AND user_id = 'user-5'", sale).
		Scan(&id))
	ids, none := []uuid.UUID{id}, []uuid.UUID{}
	return []plan{
		{sql.CatalogFindSales, []any{[]uuid.UUID{sale}, nil, 1, true}, "Index Only Scan using orders_.*_paid on orders", 0},
		{sql.LedgerOverdueSale, []any{none, none}, "Index Scan using orders_.*_due on orders", 0},
		{sql.LedgerLockOverdue, []any{sale, 500, none}, "Scan (using|on) orders_2031_02_(due|pkey)", 1},
		{sql.LedgerListOfUser, []any{"user-5", nil, 21, 21, nil}, "Scan (using|on) orders_.*_one_live_per_user", 0},
		{sql.LedgerListOfUser, []any{"user-5", id, 5000, 21, "paid"}, "Scan (using|on) orders_.*_ended_of_user", 0},
		{
			sql.LedgerListOfUserInSale,
			[]any{"user-5", nil, 21, 21, nil, sale},
			"Scan (using|on) orders_2031_02_one_live_per_user", 1,
		},
		{sql.LedgerListOfUserInSale, []any{"user-5", id, 5000, 21, "paid", sale}, "Scan (using|on) orders_2031_02_", 1},
		{
			sql.LedgerListOfPrefix,
			[]any{"user-5", "user-5\U0010FFFF", nil, 21, 21, nil, nil},
			"(?s)Index Cond:.*user_id >= 'user-5'.* <.*Scan (using|on) orders_.*_ended_of_user.*user_id >= 'user-5'", 0,
		},
		{
			sql.LedgerListOfPrefix,
			[]any{"user-5", "user-5\U0010FFFF", id, 5000, 21, "paid", sale},
			"Scan (using|on) orders_2031_02_one_live_per_user", 1,
		},
		{sql.LedgerListOfSale, []any{sale, nil, 21, 21, nil}, "Index Scan Backward using orders_2031_02_pkey on orders", 1},
		{sql.LedgerListOfSale, []any{sale, id, 5000, 21, "paid"}, "Scan (Backward )?(using|on) orders_2031_02_pkey", 1},
		{sql.PaymentListOfOrder, []any{0, 51, id, nil, nil}, "Index Scan using payment_events_of_order", 0},
		{
			sql.PaymentOpen,
			[]any{"refund_due", 0, 5000, 51, nil, "EUR", "order-expired", nil},
			"(?s)Index Scan using open_payments_due.*orders_2031_02_pkey", 0,
		},
		{sql.PaymentOpen, []any{"refund_due", 0, 51, 51, sale, nil, nil, nil}, "using open_payments_of_sale", 0},
		{sql.PaymentSearch, []any{"pi_4", "pi_5", 10}, "Index (Only )?Scan using payment_events_pkey", 0},
		{
			sql.CatalogSearchSales,
			[]any{"autumn", "open", nil, 50, 51},
			"Index (Only )?Scan Backward using sales_pkey", 0,
		},
		{sql.PaymentDue, nil, "(?s)(Index Only Scan using open_payments_due.*){3}", 0},
		{
			sql.SurveyLook, nil,
			"(?s)Index Only Scan using open_payments_position.*Index Scan using open_payments_position", 0,
		},
		{sql.LedgerFindHistory, []any{sale, id}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{
			sql.LedgerExportOrders,
			[]any{sale, id, 100, nil, nil, nil},
			"Scan (using|on) orders_2031_02_pkey", 1,
		},
		{
			sql.LedgerExportChanges,
			[]any{39_000, 40_000, 40_000, nil, nil, nil, nil, nil},
			"Index Scan using order_events_2031_03_position", 0,
		},
		{sql.LedgerChangesPage, []any{39_000, 40_000, 100}, "Index (Only )?Scan using order_events_2031_03_position", 0},
		{sql.LedgerMoveTurns, []any{500, 60.0}, "Index Scan using orders_.*_turns on orders", 0},
		{sql.LedgerNextSale, []any{sale}, "Scan using orders_2031_02_pkey on orders", 0},
		{sql.LedgerSalesOfOrders, []any{ids}, "sales_tag", 0},
		{sql.LedgerFindOrders, []any{sale, ids}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.LedgerLockOrders, []any{sale, ids, "user-5"}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.LedgerTakeReleases, []any{sale, 500}, " on orders_2031_02", 1},
		{sql.LedgerReleaseSale, []any{[]uuid.UUID{sale}}, "Index Scan using releases_", 0},
		{sql.LedgerDueReleases, nil, "releases_of_sale", 0},
		{sql.LedgerPendingReleases, []any{10000}, "Scan using releases_refused on releases", 0},
		{
			sql.LedgerChangeOrders,
			[]any{ids, []int{2}, "paid", "OrderPaid", []string{"pi"}, false, sale, nil, nil},
			"Scan (using|on) orders_2031_02_pkey", 1,
		},
		{sql.LedgerLogRefusals, []any{sale, ids}, "Index Scan using order_events_2031_02_pkey on order_events", 1},
		{
			sql.LedgerNoteTraces,
			[]any{sale, ids, make([]string, len(ids)), 2},
			"Index Scan using order_events_2031_02_pkey on order_events", 1,
		},
		{sql.RebuildEndedOrders, []any{sale}, "Index Only Scan using orders_2031_02_ended on orders", 1},
		{sql.RebuildEndedLines, []any{sale}, "Index Scan using orders_2031_02_ended on orders", 1},
		{sql.RebuildHolders, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.RebuildNewestOrders, []any{sale, 4}, "Index Scan Backward using orders_2031_02_pkey on orders", 1},
		{sql.RebuildRaiseEpoch, []any{sale, 0, 1, "server", 1, 0, 1}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.ProjectionRecount, []any{sale, false}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.ProjectionRecountItems, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.ProjectionMiscounted, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.ReconcileLockOrders, []any{sale, ids}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.ReconcileRelease, []any{sale, ids}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.ReconcileForget, []any{sale, ids}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.RelayReadOrders, []any{39_000, 40_000, 100}, "Index Scan using order_events_2031_03_position", 0},
		{sql.RelayListTargets, nil, "Index Scan using order_events_2031_03_position", 0},
		{sql.SurveyRelayTargets, nil, "Index Scan using order_events_2031_03_position", 0},
		{sql.RelayPositionOfOrder, []any{id, 2}, "Index Scan using order_events_.*_pkey", 0},
		{sql.LedgerPastOrders, []any{sale, "user-5", "key1"}, "Scan (using|on) orders_2031_02_(one_live_per_user|ended)", 1},
		{sql.CatalogRetireSale, []any{sale, 1, 1}, "orders_2031_02_(due|pkey)", 1},
		{sql.RetireOpenSale, []any{sale}, "orders_2031_02_(due|pkey)", 1},
		{sql.RetireLiveOrders, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.RetireMatchOrders, []any{sale, ids, []string{"user-5"}}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.ArchiveEvents, []any{sale}, "Scan (using|on) order_events_2031_02_pkey", 1},
		{sql.ArchiveFigures, []any{sale}, "Scan (using|on) order_events_2031_02_pkey", 1},
		{sql.ArchiveBlockers, []any{sale, 0, time.Now()}, "Scan (using|on) orders_2031_02_(due|pkey)", 1},
		{sql.ArchiveMark, []any{sale, "{}", 1, 1, 1, 1}, "Scan (using|on) order_events_2031_02_pkey", 1},
		{sql.ArchiveDeleteSome, []any{sale, uuid.Nil, 100}, "Scan using orders_2031_02_pkey", 1},
		{sql.ArchiveDeleteRest, []any{sale}, "Scan (using|on) order_events_2031_02_pkey", 1},
		{sql.AuditDrawEntries, []any{sale, uuid.Nil, id, time.Now()}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.DashboardDrawRanks, []any{sale, []string{""}, 5000, 12}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.DrawsEntries, []any{sale, id, time.Now(), 100}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.DrawsLiveEntries, []any{sale, time.Now(), 1}, "Scan (using|on) orders_2031_02_(pkey|ended_of_user)", 1},
		{sql.DrawsLost, []any{sale, sale, "", 1, 100}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.DrawsOpenRest, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
		{sql.DrawsStillWaiting, []any{sale, sale, ids, 100}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.DrawsTurns, []any{sale, sale, 0, 0, 100}, "Index Scan using orders_2031_02_pkey on orders", 1},
		{sql.DrawsWaiting, []any{sale, sale, "", 100}, "Scan (using|on) orders_2031_02_pkey", 1},
		{
			sql.CatalogFollowedSales,
			[]any{50, none},
			"(?s)(Scan Backward using orders_2031_.*_due.*){2}Scan Backward using order_events_.*position", 0,
		},
		{sql.FleetFunnel, []any{[]uuid.UUID{sale}}, "Scan (using|on) orders_2031_02_pkey", 0},
		{sql.DrawsWatched, []any{50, 20}, "Scan (using|on) orders_20", 0},
		{sql.FleetUnpaid, []any{[]uuid.UUID{sale}, 1000, 200}, "Scan using orders_2031_02_sale_id_due_idx|orders_2031_02_due", 0},
		{sql.CrowdSaleOrders, []any{sale}, "Scan (using|on) orders_2031_02_pkey", 1},
	}
}

// The cost of queries for one sale, one order or one buyer must not grow with the number of other orders, and those
// for a sale or an order read one month.
func TestQueriesUseIndexesOfOneMonth(t *testing.T) {
	t.Parallel()
	pool, sale := fourMonths(t)
	requirePlans(t, pool, plansFor(t, pool, sale))

	var final int64
	rows, err := pool.Query(t.Context(), sql.CatalogFindSales, []uuid.UUID{sale}, nil, 1, true)
	require.NoError(t, err)
	values, err := pgx.CollectOneRow(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
	require.NoError(t, err)
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT sum(quantity) FROM orders WHERE status = 'paid' AND sale_id = $1", sale).Scan(&final))
	require.Equal(t, final, values[len(values)-1])
}

// A plan that Postgres keeps for all parameters has all months, and runs on one of them.
func TestKeptPlansRunOnOneMonth(t *testing.T) {
	t.Parallel()
	pool, sale := fourMonths(t)
	conn := inSession(t, pool, "SET plan_cache_mode = force_generic_plan",
		"PREPARE find (uuid, uuid[]) AS "+sql.LedgerFindOrders)
	text := explain(t, conn, "EXPLAIN (ANALYZE) EXECUTE find('"+sale.String()+"', '{"+uuid.NewString()+"}')")
	require.Contains(t, text, "Subplans Removed: 3")
	require.Contains(t, text, "Index Scan using orders_2031_02_pkey on orders")
}

// Postgres has no statistics in the first minute of a sale, and keeps the plans of when its tables were empty. These
// must not read all orders of the sale for one of them.
func TestPlansOfNewSaleReadOrdersByIndex(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := saleIn(time.Now())
	conn := inSession(t, pool, "SET plan_cache_mode = force_generic_plan",
		"INSERT INTO sales (id, name, stock, payment_window_seconds, "+
			"payments_per_second) VALUES ('"+sale.String()+"', 'new', 100000, 600, 5)",
		"SELECT make_month(first_sale((now() + n * interval '1 month')::timestamp)) FROM generate_series(2, 24) AS n",
		`DO $$ DECLARE part text; BEGIN
			FOR part IN SELECT unnest(ARRAY[orders, events]) FROM order_months LOOP
				EXECUTE 'ALTER TABLE ' || part || ' SET (autovacuum_enabled = off)';
			END LOOP;
		END $$`)
	id := uuid.New()
	one := "{" + id.String() + "}"
	columns := func(id uuid.UUID) []string {
		return []string{
			"{" + id.String() + "}", "{" + sale.String() + "}", "{bob}", "{1}", "{20001}", "{1}",
			"{2026-11-27 10:00:00Z}", "{NULL}", "-",
		}
	}
	kept := []struct {
		query string
		args  []string // "-" for NULL
	}{
		{sql.LedgerFindOrders, []string{sale.String(), one}},
		{sql.LedgerLockOrders, []string{sale.String(), one, "-"}},
		{sql.LedgerChangeOrders, []string{one, "{2}", "paid", "OrderPaid", "{pi}", "f", sale.String(), "-", "-"}},
		{sql.LedgerNoteTraces, []string{sale.String(), one, "{trace}", "2"}},
		{sql.LedgerLogRefusals, []string{sale.String(), one}},
		{sql.LedgerPastOrders, []string{sale.String(), "ann-1", "key"}},
		{sql.LedgerRecordOrders, append(columns(uuid.New()), "-")},
		{sql.LedgerTakeReleases, []string{sale.String(), "500"}},
		{sql.LedgerAddSoldItems, []string{sale.String(), "a2c1", "1"}},
		{sql.LedgerListOfUserInSale, []string{"ann-1", "-", "21", "21", "-", sale.String()}},
		{sql.LedgerFindHistory, []string{sale.String(), id.String()}},
		{sql.ReconcileLockOrders, []string{sale.String(), one}},
		{sql.ReconcileRelease, []string{sale.String(), one}},
		{sql.ReconcileForget, []string{sale.String(), one}},
		{sql.RetireMatchOrders, []string{sale.String(), one, "{ann-7000}"}},
		{sql.PaymentAddEvents, []string{
			"{pi_0}", "{3}", "{PaymentSettled}", one, "{" + sale.String() + "}", "{5}", "{EUR}", "{NULL}", `{"{}"}`,
		}},
		{sql.PaymentFind, []string{"{pi_1,pi_2}"}},
		{sql.PaymentWaitingFor, []string{one}},
		{sql.PaymentClaims, []string{one}},
		{sql.PaymentListOfOrder, []string{"0", "51", id.String(), "-", "-"}},
		{sql.PaymentList, []string{"0", "3", "-", "{waiting,unclear}", "{PaymentSettled,PaymentDismissed}"}},
		{sql.PaymentList, []string{"0", "3", sale.String(), "{waiting,unclear}", "{PaymentSettled,PaymentDismissed}"}},
		{sql.PaymentOpen, []string{"unclear", "0", "51", "51", "-", "-", "-", "-"}},
		{sql.PaymentSearch, []string{"pi_19", "pi_1a", "10"}},
		{sql.PaymentWaiting, []string{"0", "3"}},
	}
	execute := func(options string, i int) string {
		args := make([]string, len(kept[i].args))
		for n, arg := range kept[i].args {
			if args[n] = "'" + arg + "'"; arg == "-" {
				args[n] = "NULL"
			}
		}
		return explain(t, conn, fmt.Sprintf("EXPLAIN (%s) EXECUTE kept_%d (%s)", options, i, strings.Join(args, ", ")))
	}
	for i, k := range kept {
		_, err := conn.Prepare(t.Context(), fmt.Sprint("kept_", i), counting.Replace(k.query))
		require.NoError(t, err)
		execute("COSTS OFF", i)
	}
	for _, statement := range []string{
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due, pay_from)
			SELECT CASE n WHEN 7000 THEN $2 ELSE gen_random_uuid() END, $1, 'ann-' || n, 1, 'confirmed', 2, n, 1, now(), now(),
				pay_clock() + make_interval(secs => n + 600), now() + make_interval(secs => n) FROM generate_series(1, 20000) AS n`,
		"INSERT INTO pay_turns SELECT sale_id, due - interval '10 min', true FROM orders WHERE sale_id = $1",
		`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, now() FROM orders WHERE sale_id = $1`,
		`INSERT INTO payment_events (reference, version, type, order_id, sale_id)
			SELECT 'pi_' || sequence, 1, 'PaymentReceived', id, sale_id FROM orders WHERE sale_id = $1`,
	} {
		statement = strings.NewReplacer("$1", "'"+sale.String()+"'", "$2", "'"+id.String()+"'::uuid").Replace(statement)
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	blocks := regexp.MustCompile(`Buffers: shared hit=(\d+)(?: read=(\d+))?`)
	for i, k := range kept {
		t.Run(sql.NameOf(k.query), func(t *testing.T) {
			least, text := math.MaxInt, ""
			for range 3 { // a vacuum of the new rows at the same time has a statement look for room
				_, err := conn.Exec(t.Context(), "BEGIN")
				require.NoError(t, err)
				text = execute("ANALYZE, BUFFERS, COSTS OFF, TIMING OFF", i)
				_, err = conn.Exec(t.Context(), "ROLLBACK")
				require.NoError(t, err)
				found := blocks.FindStringSubmatch(text)
				require.NotNil(t, found, text)
				hit, _ := strconv.Atoi(found[1])
				read, _ := strconv.Atoi(found[2])
				least = min(least, hit+read)
			}
			require.Less(t, least, 100, text)
		})
	}
}

// A plan that Postgres keeps for all positions reads the events behind one of them by their index.
func TestKeptPlanReadsEventsByPosition(t *testing.T) {
	t.Parallel()
	pool, _ := fourMonths(t)
	conn := inSession(t, pool, "SET plan_cache_mode = force_generic_plan",
		"PREPARE read (bigint, bigint, bigint) AS "+sql.RelayReadOrders)
	text := explain(t, conn, "EXPLAIN (ANALYZE) EXECUTE read(19000, 40000, 100)")
	require.Contains(t, text, "Index Scan using order_events_2031_02_position")
	require.NotContains(t, text, "Seq Scan on order")
	require.NotContains(t, text, "Sort  (", "a read stops after its last row")
}

// An audit of one sale reads its orders only.
func TestAuditOfSaleReadsItsMonth(t *testing.T) {
	t.Parallel()
	pool, sale := fourMonths(t)
	conn := inSession(t, pool, "CREATE TEMP TABLE audit_sales AS SELECT id AS sale_id, true AS present, 300 AS places "+
		"FROM sales WHERE id = '"+sale.String()+"'", "ANALYZE audit_sales")
	text := explain(t, conn, "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) "+sql.AuditTwoLiveOrders)
	var read []string
	for line := range strings.Lines(text) {
		if m := monthOf.FindString(line); m != "" && !strings.Contains(line, "never executed") {
			read = append(read, m)
		}
	}
	require.Equal(t, []string{" on orders_2031_02"}, read, text)
}

// readsMany are the queries that read or write many orders, or the orders of a batch, and why their plan needs no test.
var readsMany = map[string]string{
	"ledger/record_fresh":     "only inserts",
	"ledger/record_orders":    "only inserts",
	"audit/deadlines":         "joins audit_sales",
	"audit/draws":             "joins audit_sales",
	"audit/ended":             "joins audit_sales",
	"audit/entrants":          "joins audit_sales",
	"audit/figures":           "joins audit_sales",
	"audit/file":              "reads a file",
	"audit/find":              "wraps another query",
	"audit/item_figures":      "joins audit_sales",
	"audit/money":             "joins audit_sales",
	"audit/offered":           "joins audit_sales",
	"audit/offers":            "joins audit_sales",
	"audit/reservations":      "joins audit_sales",
	"audit/sequence":          "joins audit_sales",
	"audit/shard_figures":     "joins audit_sales",
	"audit/two_live_orders":   "TestAuditOfSaleReadsItsMonth",
	"audit/unfinished_buyers": "joins audit_buyers",
	"reconcile/explain":       "joins the differences",
	"payment/waiting":         "starts from the few payments that wait",
	"dashboard/draw_of":       "joins draws",
	"draws/holders":           "joins the few orders from before a draw",
	"draws/waiter":            "joins draws",
	"draws/waiting_places":    "joins draws",
	"relay/position_of_time":  "an operator's, which says so",
	"archive/insert_events":   "only inserts",
	"archive/scratch":         "reads a file",
}

// Every query for orders has a plan here, or a reason to have none.
func TestEveryQueryForOrdersHasPlan(t *testing.T) {
	t.Parallel()
	pool, sale := fourMonths(t)
	var planned []string
	for _, p := range plansFor(t, pool, sale) {
		planned = append(planned, sql.NameOf(p.query))
	}
	ofOrders := regexp.MustCompile(`(?m)^[^-]*(?:FROM|JOIN|INTO|UPDATE) (?:orders|order_events)\b`)
	for _, file := range queryFiles(t) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		name := strings.TrimSuffix(strings.TrimPrefix(file, "queries/"), ".sql")
		if !ofOrders.Match(text) || strings.HasPrefix(name, "projection/") {
			continue // a rebuild of projections reads all orders of a month
		}
		_, excused := readsMany[name]
		require.True(t, excused || slices.Contains(planned, name), name)
	}
}
