//go:build system

package audit_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
)

// ofSaleOnly are the columns of sales that do not follow from the log of orders, and why. All columns of orders follow.
var ofSaleOnly = map[string]string{
	"id": "orders and events name it", "name": "a term", "stock": "a term", "state": "a term", "per_order_limit": "a term",
	"opens_at": "a term", "closes_at": "a term", "payment_window_seconds": "a term", "payment_grace_seconds": "a term",
	"payments_per_second": "a term", "unit_price": "a term", "currency": "a term", "items": "a term",
	"offers_only": "a term", "partitions": "where it is in Redis", "shards": "where it is in Redis",
	"epoch": "counts rebuilds, and is compared with Redis", "revision": "is that of the log of the sale",
	"published_revision": "what Redis has", "created_at": "no order has it", "idempotency_key": "no order has it",
	"archived_at": "when its orders left", "retired_at": "when its buyers left Redis", "archive": "the file of its orders",
}

// inLogOnly are the parts of an order's events, by version, that no other record has, and why.
var inLogOnly = map[string]string{
	"occurred_at 2": "the row has the time of the last event", "occurred_at 3": "the row has the time of the last event",
	"data.reason 4": "an operator's", "data.operator 4": "an operator's",
}

// changed is an expression for another value of a column or of a field of data.
func changed(column, kind string) string {
	switch {
	case column == "status":
		return "'confirmed'"
	case column == "type":
		return "'OrderExpired'"
	case column == "sale_id":
		return "(SELECT id FROM sales ORDER BY id DESC LIMIT 1)"
	case kind == "uuid": // of another sale, too
		return fmt.Sprintf("(left(%[1]s::text, 35) || CASE right(%[1]s::text, 1) WHEN '0' THEN '1' ELSE '0' END)::uuid", column)
	case kind == "text":
		return fmt.Sprintf("coalesce(%s, '') || 'x'", column)
	case kind == "timestamp with time zone":
		return fmt.Sprintf("coalesce(%s, now()) + interval '9 days'", column)
	}
	return fmt.Sprintf("coalesce(%s, 0) + 7", column)
}

// An audit names each value that does not follow from the log, in every column that there is, and a rebuild of the
// projections brings it back.
func TestEachColumnFollowsFromLog(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, orders := s.OpenPayable(t, 50), ledger.New(s.Pool)
	s.Open(t, 5)
	orderOf := map[string]uuid.UUID{}
	for _, user := range []string{"ann", "bob"} {
		orderOf[user] = s.Attempt(t, sale, user, 2, "key-"+user).Reservation.OrderID
	}
	testwork.Fulfil(t, s)
	for user, id := range orderOf {
		_, err := orders.Pay(t.Context(), id, user, "pi_"+user)
		require.NoError(t, err)
	}
	_, err := orders.Withdraw(t.Context(), orderOf["bob"], "a wish", "olga")
	require.NoError(t, err)
	testwork.ReleaseUnits(t, s)
	exec := func(t *testing.T, query string, args ...any) {
		require.NoError(t, s.Exec(t, query, args...))
	}
	kept := func(t *testing.T) bool {
		report := testwork.Audit(t, s, uuid.Nil)
		require.False(t, report.Unchecked(), testwork.Text(t, report))
		return !report.Broken()
	}
	require.True(t, kept(t), testwork.Text(t, testwork.Audit(t, s, uuid.Nil)))

	columns := func(table string) []string {
		return testshop.Rows(t, s.Pool, "SELECT column_name || '/' || data_type FROM information_schema.columns "+
			"WHERE table_schema = current_schema() AND table_name = '"+table+"' ORDER BY 1")
	}
	rows := func(t *testing.T) []string {
		return testshop.Rows(t, s.Pool, "SELECT row_to_json(o)::text FROM orders AS o UNION ALL "+
			"SELECT concat_ws(' ', id, sold, last_sequence) FROM sales ORDER BY 1")
	}
	before := rows(t)
	for table, at := range map[string]string{
		"orders": fmt.Sprintf("id = '%s'", orderOf["ann"]), "sales": fmt.Sprintf("id = '%s'", sale),
	} {
		for _, c := range columns(table) {
			column, kind, _ := strings.Cut(c, "/")
			if table == "sales" && ofSaleOnly[column] != "" {
				continue
			}
			t.Run(table+"."+column, func(t *testing.T) {
				exec(t, fmt.Sprintf("UPDATE %s SET %s = %s WHERE %s", table, column, changed(column, kind), at))
				require.False(t, kept(t))
				testwork.RebuildProjections(t, s)
				require.Equal(t, before, rows(t))
				require.True(t, kept(t))
			})
		}
	}

	var parts []string
	for _, version := range []string{"2", "3", "4"} {
		for _, c := range columns("order_events") {
			if c != "data/jsonb" && c != "position/bigint" { // Postgres refuses to change a position
				parts = append(parts, version+"/"+c)
			}
		}
		parts = append(parts, testshop.Rows(t, s.Pool, `SELECT '`+version+`/data.' || key || '/' || jsonb_typeof(value)
			FROM order_events, jsonb_each(data) WHERE version = `+version+` AND order_id = '`+orderOf["bob"].String()+`'`)...)
	}
	log := testshop.Rows(t, s.Pool, "SELECT row_to_json(e)::text FROM order_events AS e")
	for _, part := range parts {
		t.Run("order_events."+part, func(t *testing.T) {
			version, c, _ := strings.Cut(part, "/")
			column, kind, _ := strings.Cut(c, "/")
			set := column + " = " + changed(column, kind)
			if key, ok := strings.CutPrefix(column, "data."); ok {
				set = fmt.Sprintf("data = data || jsonb_build_object('%[1]s', (data ->> '%[1]s') || '7')", key)
			}
			exec(t, fmt.Sprintf("UPDATE order_events SET %s WHERE version = %s AND order_id = $1", set, version), orderOf["bob"])
			require.Equal(t, inLogOnly[column+" "+version] != "", kept(t))
			exec(t, "TRUNCATE order_events")
			exec(t, `INSERT INTO order_events OVERRIDING SYSTEM VALUE
				SELECT e.* FROM unnest($1::json[]) AS row, json_populate_record(NULL::order_events, row) AS e`, log)
		})
	}
	require.True(t, kept(t))
	for part := range inLogOnly {
		column, version, _ := strings.Cut(part, " ")
		isPart := func(p string) bool { return strings.HasPrefix(p, version+"/"+column+"/") }
		require.True(t, slices.ContainsFunc(parts, isPart), part)
	}
}
