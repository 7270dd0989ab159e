//go:build system

package audit_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
)

// forgedNumbers are invalid values of a number.
var forgedNumbers = []string{
	"", "-7", "x", "007", "1e2", forgedPlaces, "9223372036854775807", "99999999999999999999",
	"\x00\xff",
}

func TestAuditReportsAndReconcileRepairsForgedSaleFields(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	forged := map[uuid.UUID]string{}
	for _, field := range audit.SaleFields {
		missing := termed(t, s)
		require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, missing), field).Err())
		forged[missing] = field + " is missing"
		values := []string{"-7", "x", "9223372036854775807"}
		if field == "left" {
			values = forgedNumbers
		}
		for _, value := range values {
			sale := termed(t, s)
			key := s.Keys.Sale(0, sale)
			require.NotEqual(t, value, s.Rdb.HGet(t.Context(), key, field).Val())
			require.NoError(t, s.Rdb.HSet(t.Context(), key, field, value).Err())
			forged[sale] = fmt.Sprintf("%s is %q", field, value)
		}
	}
	requireReportedAndRepaired(t, s, forged)
}

// The user user-1 has an order in each sale, ghost has none.
func TestAuditReportsAndReconcileRepairsForgedReservations(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	forged := map[uuid.UUID]string{}
	const at = "1a0c2d3e4f5"
	for _, form := range []string{
		"", " ", "rubbish", "$order", "$order 1", "$order 1 $place", "$order 1 $place " + at + " 5", "$uuid 1 $place " + at,
		"$order 0 $place " + at, "$order -1 $place " + at, "$order 5 $place " + at, "$order 1.5 $place " + at,
		"$order 999999999999999 $place " + at, "$order 9223372036854775807 $place " + at,
		"$order 1 -1 " + at, "$order 1 99 " + at, "$order 1 999999999999999 " + at, "$order 1 9223372036854775807 " + at,
		"$order 1 99999999999999999999 " + at,
		"$order 1 $place x", "$order 1 $place 7fffffffffffffff", "$order 1 $place -1",
		"$order 1 $place " + at + ":", "$order 1 $place " + at + ":not a fingerprint", "$order 1 $place " + at + "@x",
		"$order 1 $place " + at + "@-1",
		"$order 1 $place " + at + "@99999999999999999999", "$order 1 $place " + at + "\x00\xff", "\x00\xff",
	} {
		users := []string{"user-1"}
		if strings.HasPrefix(form, "$order 1 9") || form == "rubbish" || form == "$order 1 $place x" {
			users = append(users, "ghost")
		}
		for _, user := range users {
			sale := termed(t, s)
			id, place := order.NewOrderID(sale), int64(99)
			if user == "user-1" {
				require.NoError(t, s.Pool.QueryRow(t.Context(),
					"SELECT id, sequence FROM orders WHERE sale_id = $1 AND user_id = $2", sale, user).Scan(&id, &place))
			}
			text := strings.NewReplacer("$order", order.CompactID(id), "$uuid", id.String(), "$place",
				fmt.Sprint(place)).Replace(form)
			require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), user, text).Err())
			forged[sale] = fmt.Sprintf("%q holds %q", user, form)
		}
	}
	requireReportedAndRepaired(t, s, forged)
}

func TestAuditReportsAndReconcileRepairsKeysOfWrongType(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.OpenPayable(t, 1000)
	for i, key := range []string{
		s.Keys.Orders(0), s.Keys.Sales(0), s.Keys.Server(0), s.Keys.Outcomes(0), s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale),
		s.Keys.Ended(0, sale),
	} {
		for kind, write := range map[string]func(ctx context.Context) error{
			"string": func(ctx context.Context) error { return s.Rdb.Set(ctx, key, "x", 0).Err() },
			"list":   func(ctx context.Context) error { return s.Rdb.LPush(ctx, key, "x").Err() },
		} {
			// An order that only Redis has loses its event with the stream. No other key loses an order.
			o := s.Buy(t, sale, fmt.Sprintf("buyer-%d-%s", i, kind))
			if key != s.Keys.Orders(0) {
				testwork.ProcessWaiting(t, s)
			}
			require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
			require.NoError(t, write(t.Context()))
			requireReportedAndRepaired(t, s, map[uuid.UUID]string{sale: key + " is a " + kind})
			require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, o).Status)
			s.Buy(t, sale, fmt.Sprintf("after-%d-%s", i, kind))
			testwork.ProcessWaiting(t, s)
		}
	}
	aside, err := s.Rdb.Keys(t.Context(), "*:set-aside:*").Result()
	require.NoError(t, err)
	require.Len(t, aside, 8, "the wrong keys are kept")
}

func TestReconcileRequiresCorrectProjections(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 40)
	s.Crowd(t, sale, 20)
	testwork.Fulfil(t, s)
	_, err := s.Pool.Exec(t.Context(),
		"DELETE FROM orders WHERE user_id = 'user-1'; UPDATE orders SET status = 'rejected' WHERE user_id = 'user-2'; "+
			"UPDATE sales SET sold = 3")
	require.NoError(t, err)
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 3).Err())
	before := s.Everything(t)
	report := testwork.Reconcile(t, s)
	require.Equal(t, "release rebuild projections", testwork.Unmended(report))
	require.Positive(t, report.Remaining)
	require.Equal(t, before, s.Everything(t))
	testwork.RebuildProjections(t, s)
	testwork.RequireMended(t, s, sale, "")
}

// During a sale with continuous purchases and cancellations, Reconcile repairs only real damage.
func TestReconcileDuringRunningSaleChangesNothingElse(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sales := []uuid.UUID{s.OpenPayable(t, 20), s.Open(t, 100_000)}
	testwork.Work(t, testwork.Config(t, s))
	ctx, over := context.WithCancel(t.Context())
	defer over()
	orders := ledger.New(s.Pool)
	const thinkTime = 5 * time.Millisecond
	var cancelled, sold atomic.Int64
	var crowd errgroup.Group
	for b := range 4 {
		crowd.Go(func() error {
			for n := 0; ctx.Err() == nil; n++ {
				user := fmt.Sprintf("buyer-%d", b)
				answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sales[0], User: user, Quantity: 3})
				if err != nil {
					return err
				}
				other, err := s.Store.Reserve(t.Context(),
					reservation.Request{Sale: sales[1], User: fmt.Sprint(user, "-", n), Quantity: 1})
				if err != nil {
					return err
				}
				if other.Verdict == reservation.Reserved {
					sold.Add(1)
				}
				retry.Pause(thinkTime, ctx.Done()) // so that a slow reconcile does not meet ever more orders
				for answer.Verdict == reservation.Reserved && ctx.Err() == nil {
					if _, err := orders.Cancel(t.Context(), answer.Reservation.OrderID, user); err == nil {
						cancelled.Add(1)
						break
					}
				}
			}
			return nil
		})
	}
	config := testwork.ReconcileConfig(t, s)
	for round := range 6 {
		at := cancelled.Load()
		report, err := audit.Reconcile(t.Context(), config)
		require.NoError(t, err)
		for _, r := range report.Remedies {
			require.Equal(t, audit.RemedyWorker, r.Remedy, "round %d: %+v", round, report)
		}
		testkit.Eventually(t, 30*time.Second, "the sale continues", func() bool { return cancelled.Load() > at+10 })
	}
	require.Zero(t, s.Count(t, repairs))

	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = sold + 7 WHERE id = $1", sales[1]))
	testkit.Eventually(t, 30*time.Second, "the counter is repaired", func() bool {
		_, err := audit.Reconcile(t.Context(), config)
		require.NoError(t, err)
		return s.Count(t, repairs) > 0
	})
	require.EqualValues(t, 1, s.Count(t, repairs))
	over()
	require.NoError(t, crowd.Wait())
	after, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Wait: 30 * time.Second})
	require.NoError(t, err)
	require.False(t, after.Broken(), testwork.Text(t, after))
	require.EqualValues(t, sold.Load(), testshop.Sold(t, s.Pool, sales[1]))
}

func TestReconcileRebuildsEmptiedRedisOfShardsOnce(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 8)
	sales := []uuid.UUID{s.OpenSharded(t, 40, 4), s.OpenSharded(t, 40, 8), s.Open(t, 40)}
	for _, sale := range sales {
		s.Crowd(t, sale, 30)
	}
	testwork.FulfilAll(t, s)
	requireFlushRepairedOnce(t, s, len(sales))
	s.RequireShards(t, sales[0])
	s.RequireShards(t, sales[1])
}

// While buyers of one shard need the units of all others, and units return, no difference lasts.
func TestReconcileDuringMovesChangesNothing(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 12)
	testwork.Work(t, testwork.Config(t, s.Shop))
	ctx, over := context.WithCancel(t.Context())
	defer over()
	orders := ledger.New(s.Pool)
	var cancelled atomic.Int64
	var crowd errgroup.Group
	for b := range 4 {
		crowd.Go(func() error {
			for n := 0; ctx.Err() == nil; n++ {
				user := s.user((n/3)%4, b)
				answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: s.sale, User: user, Quantity: 3})
				if err != nil {
					return err
				}
				for answer.Verdict == reservation.Reserved && ctx.Err() == nil {
					if _, err := orders.Cancel(t.Context(), answer.Reservation.OrderID, user); err == nil {
						cancelled.Add(1)
						break
					}
				}
			}
			return nil
		})
	}
	config := testwork.ReconcileConfig(t, s.Shop)
	for round := range 8 {
		at := cancelled.Load()
		report, err := audit.Reconcile(t.Context(), config)
		require.NoError(t, err)
		for _, r := range report.Remedies {
			require.Equal(t, audit.RemedyWorker, r.Remedy, "round %d: %+v", round, report)
		}
		testkit.Eventually(t, 30*time.Second, "the sale continues", func() bool { return cancelled.Load() > at+10 })
	}
	require.Zero(t, s.Count(t, repairs))
	var given int64
	for shard := range 4 {
		for other := range 4 {
			given += s.number(shard, fmt.Sprint("given:", other))
		}
	}
	require.Positive(t, given, "units were moved")
	over()
	require.NoError(t, crowd.Wait())
	after, err := audit.Run(t.Context(),
		audit.Config{Catalog: s.Catalog, Wait: 30 * time.Second})
	require.NoError(t, err)
	require.False(t, after.Broken(), testwork.Text(t, after))
}

// A unit returns to one shard, and others give units, after the shards were read and before their buyers are.
func TestAuditIgnoresUnitsThatMoveMeanwhile(t *testing.T) {
	t.Parallel()
	s := openSharded(t, 40)
	user := s.user(2, 0)
	id := s.Buy(t, s.sale, user)
	s.Buy(t, s.sale, s.user(1, 0))
	testwork.FulfilAll(t, s.Shop)
	report, err := audit.Run(t.Context(), audit.Config{
		Sale: s.sale,
		Catalog: s.Next(t, movingRedis(t, func() {
			testwork.Cancel(t, ledger.New(s.Pool), id, user)
			testwork.ReleaseUnits(t, s.Shop)
			testwork.GiveUnits(t, s.Shop, s.sale, 0, 1)
		})).Catalog,
	})
	require.NoError(t, err)
	require.True(t, report.Moved)
	require.Equal(t, "S4", testwork.Broken(report), testwork.Text(t, report))
	require.EqualValues(t, 1, report.Promise("S4").Found, testwork.Text(t, report))
	require.Empty(t, report.Promise("S4").Findings[0].Remedy)
	require.EqualValues(t, 39, s.requireKept().Available)
}

// A master and its replica freeze. The audit says which partitions it could not read, and still finds what differs in
// the others. A sale with a shard in a frozen partition cannot be read.
func TestAuditChecksPartitionsApartFromFrozenMaster(t *testing.T) {
	t.Parallel()
	s := testshop.NewClusterShop(t)
	const frozen = 0
	apart := s.PartitionApart(t, frozen)
	stuck, other := s.OpenIn(t, frozen, 10), s.OpenIn(t, apart, 10)
	spread := s.OpenSharded(t, 80, 8)
	for s.Keys.Partition(spread) != apart { // its first shard is not in the frozen partition
		spread = s.OpenSharded(t, 80, 8)
	}
	stop := testwork.Work(t, testwork.Config(t, s.Shop))
	s.Buy(t, stuck, "ann")
	s.Buy(t, other, "ann")
	require.Equal(t, 20, s.Crowd(t, spread, 20))
	s.AwaitConfirmed(t, 22)
	stop()
	look := func() audit.Report {
		report, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Wait: 10 * time.Second})
		require.NoError(t, err)
		return report
	}
	whole := look()
	require.False(t, whole.Broken() || whole.Unchecked(), "%+v", whole.Promises)

	thaw := s.Freeze(t, frozen)
	found := look()
	require.False(t, found.Broken(), "a sale that cannot be read is no difference: %+v", found.Promises)
	require.True(t, found.Unchecked())
	require.Contains(t, found.Promise("S4").Unchecked[0], "partition 0: ")
	require.Empty(t, found.Promise("S1").Unchecked, "Postgres alone shows it")
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(apart, other), "left", -1).Err())
	found = look()
	require.EqualValues(t, 1, found.Promise("S4").Found, "%+v", found.Promises)
	require.Equal(t, other, *found.Promise("S4").Findings[0].Sale)
	thaw()
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(apart, other), "left", 1).Err())
	testkit.Eventually(t, testshop.Soon, "all partitions answer", func() bool { return !look().Unchecked() })
	require.False(t, look().Broken())
}

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
