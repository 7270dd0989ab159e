package audit_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// forgedPlaces is the highest count that a script reads: it may be true.
const forgedPlaces = "999999999999999"

func TestAuditReportsMissingPlacesAndRebuildCoversThem(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := termed(t, s)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "sequence", forgedPlaces).Err())
	require.Contains(t, testwork.Text(t, testwork.Audit(t, s, sale)),
		"places 3 to 999999999999999 of the sale were given out and no order has them")
	require.Equal(t, "operator", testwork.Unmended(testwork.Reconcile(t, s)))
	_, err := testwork.Rebuilder(t, s).Sale(t.Context(), sale, rebuild.ReasonByHand) // as the remedy says
	require.NoError(t, err)
	s.RequireSound(t)
}

// requireReportedAndRepaired requires that the audit of each sale reports its damage, and that Reconcile repairs all.
func requireReportedAndRepaired(t testing.TB, s *testshop.Shop, damage map[uuid.UUID]string) {
	t.Helper()
	reported := make(map[uuid.UUID]string, len(damage))
	for sale, what := range damage {
		report, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Sale: sale})
		require.NoError(t, err, what)
		reported[sale] = testwork.Text(t, report)
		require.True(t, report.Broken(), "%s: %s", what, reported[sale])
		require.False(t, report.Unchecked(), "%s: %s", what, reported[sale])
	}
	reconciled := testwork.Reconcile(t, s)
	require.Zero(t, reconciled.Remaining, "%+v\n%v\nwere: %v", reconciled, damage, reported)
	require.NoError(t, testwork.Heal(t, s, testwork.Rebuilder(t, s), 1), damage)
	testwork.ProcessWaiting(t, s)
	// The event of a rebuilt sale may have been appended.
	if reconciled = testwork.Reconcile(t, s); len(reconciled.Remedies) > 0 {
		testwork.ProcessWaiting(t, s)
	}
	after := testwork.Audit(t, s, uuid.Nil)
	require.False(t, after.Broken() || after.Unchecked(), "%s\n%v\nwere:\n%v", testwork.Text(t, after), damage, reported)
	testwork.RequireNoNeeds(t, s, 1)
}

// A reservation beyond the last place is no concurrent one.
func TestAuditReportsReservationBeyondLastPlace(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := termed(t, s)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), "ghost",
		order.CompactID(order.NewOrderID(sale))+" 1 3 1a0c2d3e4f5").Err())
	report := testwork.Audit(t, s, sale)
	require.Contains(t, testwork.Text(t, report),
		"user ghost: the reservation is at place 3, and the sale has given out 2")
}

func TestAuditReportsAndReconcileRepairsUnlistedSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := termed(t, s)
	require.NoError(t, s.Rdb.SRem(t.Context(), s.Keys.Sales(0), sale.String()).Err())
	require.Contains(t, testwork.Text(t, testwork.Audit(t, s, sale)), "Redis has the sale, and does not list it")
	requireReportedAndRepaired(t, s, map[uuid.UUID]string{sale: "not listed"})
}

func TestAuditTerminatesOnForgedPlace(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	require.NoError(t, s.Exec(t, "UPDATE orders SET sequence = 1000000000000 WHERE sequence = 3"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	report, err := audit.Run(ctx, audit.Config{Catalog: s.Catalog, Sale: sale})
	require.NoError(t, err)
	require.Contains(t, testwork.Text(t, report),
		"places 4 to 999999999999 of the sale were given out and no order has them")
}

func TestAuditReportsSaleMissingInPostgres(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	for _, table := range []string{"orders", "order_events", "sale_events", "sales"} {
		require.NoError(t, s.Exec(t, "DELETE FROM "+table))
	}
	report := testwork.Audit(t, s, uuid.Nil)
	require.Equal(t, "S7", testwork.Broken(report), testwork.Text(t, report))
	require.Contains(t, testwork.Text(t, report), "Redis has this sale, with 3 buyers, and Postgres does not know it")
	remedies := []audit.Remedy{}
	for _, p := range report.Promises {
		for _, f := range p.Findings {
			remedies = append(remedies, f.Remedy)
		}
	}
	require.Equal(t, []audit.Remedy{"unknown-sale"}, remedies, "a rebuild needs the sale in Postgres")
}

// Forged rows do not stop the audit, and each has a command that repairs it.
func TestAuditReportsForgedRows(t *testing.T) {
	t.Parallel()
	for damage, by := range map[string]string{
		"UPDATE sales SET opens_at = 'infinity'":                                    "operator",
		"UPDATE sales SET opens_at = '-infinity'":                                   "operator",
		"UPDATE sales SET closes_at = 'infinity'":                                   "operator",
		"UPDATE sales SET stock = 9223372036854775807":                              "operator",
		"UPDATE sales SET epoch = 77":                                               "reconcile",
		"UPDATE sales SET epoch = -1":                                               "operator",
		"UPDATE sales SET sold = 20":                                                "reconcile",
		"UPDATE sales SET per_order_limit = 9223372036854775807":                    "operator",
		"UPDATE sales SET partitions = 2147483647":                                  "operator",
		"UPDATE orders SET quantity = 9223372036854775807":                          "projections",
		"UPDATE orders SET sequence = 9223372036854775807 WHERE user_id = 'user-1'": "projections",
		"UPDATE orders SET sequence = -1 WHERE user_id = 'user-1'":                  "projections",
		"UPDATE orders SET sequence = 0 WHERE user_id = 'user-1'":                   "projections",
		"UPDATE orders SET user_id = E'\\u001b[31m' WHERE user_id = 'user-1'":       "projections",
		"UPDATE orders SET status = 'paid' WHERE user_id = 'user-1'":                "projections",
		"UPDATE orders SET version = 2147483647 WHERE user_id = 'user-1'":           "projections",
		"UPDATE orders SET sale_id = overlay(sale_id::text PLACING 'ffff' FROM 33)::uuid WHERE " +
			"user_id = 'user-1'": "projections",
		"DELETE FROM orders WHERE user_id = 'user-1'":                              "projections",
		"UPDATE order_events SET quantity = 9223372036854775807 WHERE version = 2": "operator",
		"UPDATE order_events SET type = 'Nonsense' WHERE version = 2":              "operator",
		"UPDATE order_events SET version = 2147483647 WHERE version = 2":           "operator",
		"UPDATE order_events SET data = '[]' WHERE version = 2":                    "operator",
		"UPDATE order_events SET data = '\"x\"' WHERE version = 2":                 "operator",
		"UPDATE order_events SET sequence = NULL WHERE version = 2":                "operator",
		"UPDATE order_events SET epoch = NULL WHERE version = 2":                   "operator",
		"INSERT INTO releases SELECT gen_random_uuid(), id, 'ghost', " +
			"9223372036854775807 FROM sales": "reconcile",
		"INSERT INTO releases SELECT id, sale_id, user_id, quantity FROM orders": "reconcile",
		"INSERT INTO sale_events (sale_id, revision, type, data) SELECT id, 2, 'SaleRebuilt', '{\"sequence\": " +
			"\"x\"}' FROM sales": "reconcile",
		"INSERT INTO sale_events (sale_id, revision, type, data) SELECT id, 2, 'SaleRebuilt', '[]' FROM sales": "reconcile",
		"INSERT INTO sale_events (sale_id, revision, type, data) SELECT id, 2, 'Nonsense', '\"\"' FROM sales":  "reconcile",
		"WITH forged AS (INSERT INTO sale_events (sale_id, revision, type, data) SELECT id, 2, 'Nonsense', '{}' " +
			"FROM sales) UPDATE sales SET revision = 2": "operator",
	} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			termed(t, s)
			require.NoError(t, s.Exec(t, damage))
			report := testwork.Audit(t, s, uuid.Nil)
			require.True(t, report.Broken(), testwork.Text(t, report))
			require.False(t, report.Unchecked(), testwork.Text(t, report))
			reconciled := testwork.Reconcile(t, s)
			switch by {
			case "operator":
				require.Positive(t, reconciled.Remaining)
				return
			case "projections":
				require.Contains(t, testwork.Unmended(reconciled), "projections")
				testwork.RebuildProjections(t, s)
				reconciled = testwork.Reconcile(t, s)
			}
			require.Zero(t, reconciled.Remaining, "%+v\n%s", reconciled, testwork.Text(t, report))
			testwork.ProcessWaiting(t, s)
			report = testwork.Audit(t, s, uuid.Nil)
			require.False(t, report.Broken() || report.Unchecked(), testwork.Text(t, report))
		})
	}
}

func TestLatestIsNewestRecordedAudit(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	latest, err := audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Nil(t, latest, "none was recorded")

	begun := time.Now().Add(-time.Minute) // the server's clock may differ
	s.Buy(t, sale, "alice")
	require.NoError(t, audit.Record(t.Context(), s.Pool, testwork.Audit(t, s, uuid.Nil), "ann"))
	latest, err = audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	require.True(t, latest.At.After(begun))
	latest.At = time.Time{}
	require.Equal(t, &audit.Recorded{Operator: "ann", Broken: []string{"S3"}, Unchecked: []string{}}, latest)

	testwork.Fulfil(t, s)
	require.NoError(t, audit.Record(t.Context(), s.Pool, testwork.Audit(t, s, uuid.Nil), ""))
	latest, err = audit.Latest(t.Context(), s.Pool)
	require.NoError(t, err)
	latest.At = time.Time{}
	require.Equal(t, &audit.Recorded{Broken: []string{}, Unchecked: []string{}}, latest)

	found := audit.Report{Moved: true, Promises: []audit.Promise{
		{Name: "S1", Found: 2},
		{Name: "S2"},
		{Name: "S4", Found: 1, Unchecked: []string{"no answer"}},
		{Name: "S7", Unchecked: []string{"no answer"}},
	}}
	for _, step := range []struct {
		moved             bool
		broken, unchecked []string
		because           string
	}{
		{true, []string{"S1"}, []string{"S4", "S7"}, "what differs from Redis may have been on its way"},
		{false, []string{"S1", "S4"}, []string{"S4", "S7"}, "nothing was on its way"},
		{true, []string{"S1", "S4"}, []string{"S4", "S7"}, "it was broken before"},
	} {
		found.Moved = step.moved
		require.NoError(t, audit.Record(t.Context(), s.Pool, found, "bob"))
		latest, err = audit.Latest(t.Context(), s.Pool)
		require.NoError(t, err)
		latest.At = time.Time{}
		want := &audit.Recorded{Operator: "bob", Broken: step.broken, Unchecked: step.unchecked}
		require.Equal(t, want, latest, step.because)
	}
}

func TestRecordKeepsNewestThousand(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testshop.Exec(t, pool, `INSERT INTO audits (operator, broken, unchecked)
		SELECT 'old ' || n, '{}', '{}' FROM generate_series(1, 1005) AS n`)
	require.NoError(t, audit.Record(t.Context(), pool, audit.Report{}, "new"))
	var kept int
	var oldest string
	require.NoError(t, pool.QueryRow(t.Context(),
		"SELECT count(*), (array_agg(operator ORDER BY id))[1] FROM audits").Scan(&kept, &oldest))
	require.Equal(t, 1000, kept)
	require.Equal(t, "old 7", oldest)
	latest, err := audit.Latest(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, "new", latest.Operator)
}

// rebuilt changes a sale as a rebuild does that knew 40 places and found 30 orders.
func rebuilt(t testing.TB, s *testshop.Shop, sale uuid.UUID, sequence int64) {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), `WITH raised AS (
			UPDATE sales SET epoch = epoch + 1, revision = revision + 1, published_revision = revision + 1 WHERE id = $1
			RETURNING id, revision, epoch)
		INSERT INTO sale_events (sale_id, revision, type, data)
		SELECT id, revision, 'SaleRebuilt', jsonb_build_object('epoch', epoch, 'sequence', $2::bigint) FROM raised`, sale,
		sequence)
	require.NoError(t, err)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "epoch", 2, "sequence", sequence, "revision",
		2).Err())
	held, err := s.Rdb.HGetAll(t.Context(), s.Keys.Buyers(0, sale)).Result()
	require.NoError(t, err)
	for user, text := range held {
		require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), user, text+"@1").Err())
	}
}

// After a rebuild the places of lost orders are counted, and late events of these orders are voided.
func TestAuditCountsOrdersLostBeforeRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 40)
	require.Equal(t, 30, s.Crowd(t, sale, 30))
	testwork.Fulfil(t, s)
	rebuilt(t, s, sale, 40)
	s.Buy(t, sale, "after")
	testwork.Fulfil(t, s)
	report := testwork.RequireUnbroken(t, s, sale)
	require.EqualValues(t, 10, report.Sales[0].Lost)

	// Two lost orders arrive late. The place of the second one was assigned again.
	late := []order.OrderReserved{testshop.Reserved(sale, "late", 35), testshop.Reserved(sale, "later", 41)}
	testwork.Record(t, ledger.New(s.Pool), late)
	report = testwork.RequireUnbroken(t, s, sale)
	require.EqualValues(t, 9, report.Sales[0].Lost)
	require.EqualValues(t, 2, report.Sales[0].Voided)
	require.Contains(t, testwork.Text(t, report), "41 places given out; 2 orders voided, 9 more lost with Redis")

	// Places of the new epoch are counted as before.
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "sequence", 2).Err())
	report = testwork.Audit(t, s, sale)
	require.Equal(t, "S5", testwork.Broken(report))
	require.Contains(t, testwork.Text(t, report), "places 42 to 43 of the sale were given out and no order has them")
}

func TestAuditReportsPayableOrdersWithoutDeadline(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 10)
	s.Crowd(t, sale, 3)
	id := testwork.Fulfil(t, s)[0].Event.OrderID
	require.NoError(t, s.Exec(t, "UPDATE orders SET due = NULL WHERE id = $1", id))
	report := testwork.Audit(t, s, sale)
	require.Equal(t, "S3 S5", testwork.Broken(report), testwork.Text(t, report))
	finding := report.Promise("S3").Findings[0]
	require.Equal(t, id, *finding.Order)
	require.Equal(t, audit.RemedyProjections, finding.Remedy)
	require.Equal(t, "OrderConfirmed at version 2", finding.LastEvent)
	require.NoError(t, s.Exec(t, "UPDATE order_events SET due = NULL WHERE order_id = $1 AND version = 2", id))
	report = testwork.Audit(t, s, sale)
	require.Equal(t, audit.RemedyOperator, report.Promise("S3").Findings[0].Remedy)
}

func TestAuditReportsLastEventOfEachDifference(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 10)
	s.Crowd(t, sale, 3)
	event := testwork.Fulfil(t, s)[0].Event
	testwork.Cancel(t, ledger.New(s.Pool), event.OrderID, event.UserID)
	require.NoError(t, s.Exec(t, "DELETE FROM releases"))
	_, err := s.Catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 3"))
	text := testwork.Text(t, testwork.Audit(t, s, sale))
	require.Contains(t, text, "order "+event.OrderID.String()+", user "+event.UserID+
		": the order is cancelled and its units are still taken in Redis (last event: OrderCancelled at version 3)")
	require.Contains(t, text, "the events come to 2 (last event: SalePaused at revision 2)")
	encoded, err := json.Marshal(testwork.Audit(t, s, sale))
	require.NoError(t, err)
	require.Contains(t, string(encoded), `"last_event":"OrderCancelled at version 3","remedy":"release"`)
}

func TestAuditReportsEquationOfEachSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	for range audit.EquationsShown + 2 {
		s.Buy(t, s.Open(t, 5), "ann")
	}
	text := testwork.Text(t, testwork.Audit(t, s, uuid.Nil))
	require.Equal(t, audit.EquationsShown, strings.Count(text, "      5 = 4 available + 1 held + 0 sold   sale "))
	require.Contains(t, text, "      … and 2 more sales\n")
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 1"))
	require.Contains(t, testwork.Text(t, testwork.Audit(t, s, uuid.Nil)),
		"      5 ≠ 4 available + 1 held + 1 sold   sale ")
}

// movingRedis returns a client of the shop's Redis that calls do once, before buyers are read.
func movingRedis(t testing.TB, do func()) redis.UniversalClient {
	t.Helper()
	rdb := testkit.Control(t, testkit.RedisURL(t))
	var once sync.Once
	rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "hscan" { // a sale was read, and its buyers are not
			once.Do(do)
		}
		return next(ctx, cmd)
	}))
	return rdb
}

func TestAuditRetriesAfterConcurrentChange(t *testing.T) {
	t.Parallel()
	for name, wait := range map[string]time.Duration{"without wait": 0, "with wait": 30 * time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.OpenPayable(t, 10)
			s.Crowd(t, sale, 3)
			event := testwork.Fulfil(t, s)[0].Event
			report, err := audit.Run(t.Context(), audit.Config{
				Sale: sale, Wait: wait,
				Catalog: s.Next(t, movingRedis(t, func() {
					testwork.Cancel(t, ledger.New(s.Pool), event.OrderID, event.UserID)
					testwork.ReleaseUnits(t, s)
				})).Catalog,
			})
			require.NoError(t, err)
			require.Equal(t, wait == 0, report.Broken(), testwork.Text(t, report))
			require.Equal(t, wait == 0, report.Moved)
			require.Equal(t, wait == 0, strings.Contains(testwork.Text(t, report), "Units moved during the audit"))
			if wait > 0 {
				require.EqualValues(t, 8, report.Sales[0].Available)
			}
		})
	}
}

// Orders that are accepted or recorded during the audit are no findings. Only the sum of the sale differs.
func TestAuditIgnoresConcurrentOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	moving := func() redis.UniversalClient {
		return movingRedis(t, func() {
			s.Buy(t, sale, uuid.NewString()) // unread by workers
			last, err := s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "sequence").Int64()
			require.NoError(t, err)
			late := testshop.Reserved(sale, uuid.NewString(), last+1)
			late.OrderID = s.Buy(t, sale, late.UserID)
			testwork.Record(t, ledger.New(s.Pool), []order.OrderReserved{late})
		})
	}
	report, err := audit.Run(t.Context(), audit.Config{Catalog: s.Next(t, moving()).Catalog, Sale: sale})
	require.NoError(t, err)
	require.Equal(t, "S4", testwork.Broken(report), testwork.Text(t, report))
	require.EqualValues(t, 1, report.Promise("S4").Found)
	require.Empty(t, report.Promise("S4").Findings[0].Remedy)
	require.True(t, report.Moved)
}

func TestAuditReportsLastingDifferenceWithoutWaiting(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(t, s)
	require.NoError(t, s.Exec(t, "UPDATE sales SET sold = 1"))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	report, err := audit.Run(ctx, audit.Config{Catalog: s.Catalog, Sale: sale, Wait: time.Hour})
	require.NoError(t, err)
	require.Equal(t, "S4", testwork.Broken(report))
	require.False(t, report.Moved)
}
