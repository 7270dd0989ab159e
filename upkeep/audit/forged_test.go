package audit_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation/order"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

// forgedNumbers are invalid values of a number.
var forgedNumbers = []string{
	"", "-7", "x", "007", "1e2", forgedPlaces, "9223372036854775807", "99999999999999999999",
	"\x00\xff",
}

// forgedPlaces is the highest count that a script reads: it may be true.
const forgedPlaces = "999999999999999"

func TestAuditReportsMissingPlacesAndRebuildCoversThem(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := termed(s, t)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "sequence", forgedPlaces).Err())
	require.Contains(t, testwork.TextOf(t, testwork.Audit(s, t, sale)),
		"places 3 to 999999999999999 of the sale were given out and no order has them")
	require.Equal(t, "operator", testwork.LeftOf(testwork.Reconcile(s, t)))
	_, err := testwork.Rebuilder(s, t).Sale(t.Context(), sale, rebuild.ReasonByHand) // as the remedy says
	require.NoError(t, err)
	s.RequireSound(t)
}

// requireReportedAndRepaired requires that the audit of each sale reports its damage, and that Reconcile repairs all.
func requireReportedAndRepaired(s *testshop.Shop, t testing.TB, damage map[uuid.UUID]string) {
	t.Helper()
	reported := make(map[uuid.UUID]string, len(damage))
	for sale, what := range damage {
		report, err := audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Sale: sale})
		require.NoError(t, err, what)
		reported[sale] = testwork.TextOf(t, report)
		require.True(t, report.Broken(), "%s: %s", what, reported[sale])
		require.False(t, report.Unchecked(), "%s: %s", what, reported[sale])
	}
	reconciled := testwork.Reconcile(s, t)
	require.Zero(t, reconciled.Remaining, "%+v\n%v\nwere: %v", reconciled, damage, reported)
	require.NoError(t, testwork.Heal(s, t, testwork.Rebuilder(s, t), 1), damage)
	testwork.ProcessWaiting(s, t)
	// The event of a rebuilt sale may have been appended.
	if reconciled = testwork.Reconcile(s, t); len(reconciled.Remedies) > 0 {
		testwork.ProcessWaiting(s, t)
	}
	after := testwork.Audit(s, t, uuid.Nil)
	require.False(t, after.Broken() || after.Unchecked(), "%s\n%v\nwere:\n%v", testwork.TextOf(t, after), damage, reported)
	testwork.RequireNoNeeds(s, t, 1)
}

func TestAuditReportsAndReconcileRepairsForgedSaleFields(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	forged := map[uuid.UUID]string{}
	for _, field := range audit.SaleFields {
		missing := termed(s, t)
		require.NoError(t, s.Rdb.HDel(t.Context(), s.Keys.Sale(0, missing), field).Err())
		forged[missing] = field + " is missing"
		values := []string{"-7", "x", "9223372036854775807"}
		if field == "left" {
			values = forgedNumbers
		}
		for _, value := range values {
			sale := termed(s, t)
			key := s.Keys.Sale(0, sale)
			require.NotEqual(t, value, s.Rdb.HGet(t.Context(), key, field).Val())
			require.NoError(t, s.Rdb.HSet(t.Context(), key, field, value).Err())
			forged[sale] = fmt.Sprintf("%s is %q", field, value)
		}
	}
	requireReportedAndRepaired(s, t, forged)
}

// The user user-1 has an order in each sale, ghost has none.
func TestAuditReportsAndReconcileRepairsForgedReservations(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
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
			sale := termed(s, t)
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
	requireReportedAndRepaired(s, t, forged)
}

// A reservation beyond the last place is no concurrent one.
func TestAuditReportsReservationBeyondLastPlace(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := termed(s, t)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Buyers(0, sale), "ghost",
		order.CompactID(order.NewOrderID(sale))+" 1 3 1a0c2d3e4f5").Err())
	report := testwork.Audit(s, t, sale)
	require.Contains(t, testwork.TextOf(t, report),
		"user ghost: the reservation is at place 3, and the sale has given out 2")
}

func TestAuditReportsAndReconcileRepairsKeysOfWrongType(t *testing.T) {
	t.Parallel()
	s := testshop.NewLostShop(t)
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
				testwork.ProcessWaiting(s.Shop, t)
			}
			require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
			require.NoError(t, write(t.Context()))
			requireReportedAndRepaired(s.Shop, t, map[uuid.UUID]string{sale: key + " is a " + kind})
			require.Equal(t, order.StatusConfirmed, testwork.OrderOfID(t, s.Pool, o).Status)
			s.Buy(t, sale, fmt.Sprintf("after-%d-%s", i, kind))
			testwork.ProcessWaiting(s.Shop, t)
		}
	}
	aside, err := s.Rdb.Keys(t.Context(), "*:set-aside:*").Result()
	require.NoError(t, err)
	require.Len(t, aside, 8, "the wrong keys are kept")
}

func TestAuditReportsAndReconcileRepairsUnlistedSale(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := termed(s, t)
	require.NoError(t, s.Rdb.SRem(t.Context(), s.Keys.Sales(0), sale.String()).Err())
	require.Contains(t, testwork.TextOf(t, testwork.Audit(s, t, sale)), "Redis has the sale, and does not list it")
	requireReportedAndRepaired(s, t, map[uuid.UUID]string{sale: "not listed"})
}

func TestAuditTerminatesOnForgedPlace(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(s, t)
	_, err := s.Pool.Exec(t.Context(), "UPDATE orders SET sequence = 1000000000000 WHERE sequence = 3")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	report, err := audit.Run(ctx, audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Sale: sale})
	require.NoError(t, err)
	require.Contains(t, testwork.TextOf(t, report),
		"places 4 to 999999999999 of the sale were given out and no order has them")
}

func TestAuditReportsSaleMissingInPostgres(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Crowd(t, sale, 3)
	testwork.Fulfil(s, t)
	for _, table := range []string{"orders", "order_events", "sale_events", "sales"} {
		_, err := s.Pool.Exec(t.Context(), "DELETE FROM "+table)
		require.NoError(t, err)
	}
	report := testwork.Audit(s, t, uuid.Nil)
	require.Equal(t, "S7", testwork.Broken(report), testwork.TextOf(t, report))
	require.Contains(t, testwork.TextOf(t, report), "Redis has this sale, with 3 buyers, and Postgres does not know it")
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
		"UPDATE orders SET sale_id = '01700000-0000-7000-8000-000000000000' WHERE " +
			"user_id = 'user-1'": "projections",
		"DELETE FROM orders WHERE user_id = 'user-1'":                              "projections",
		"UPDATE order_events SET quantity = 9223372036854775807 WHERE version = 2": "operator",
		"UPDATE order_events SET type = 'Nonsense' WHERE version = 2":              "operator",
		"UPDATE order_events SET version = 2147483647 WHERE version = 2":           "operator",
		"UPDATE order_events SET data = '[]' WHERE version = 2":                    "operator",
		"UPDATE order_events SET data = '\"x\"' WHERE version = 2":                 "operator",
		"UPDATE order_events SET data = '{\"sequence\": {}}' WHERE version = 2":    "operator",
		"INSERT INTO releases SELECT gen_random_uuid(), id, 'ghost', " +
			"9223372036854775807 FROM sales": "reconcile",
		"INSERT INTO releases SELECT id, sale_id, user_id, quantity FROM orders": "reconcile",
		"INSERT INTO sale_events SELECT id, 2, 'SaleRebuilt', '{\"sequence\": " +
			"\"x\"}' FROM sales": "reconcile",
		"INSERT INTO sale_events SELECT id, 2, 'SaleRebuilt', '[]' FROM sales": "reconcile",
		"INSERT INTO sale_events SELECT id, 2, 'Nonsense', '\"\"' FROM sales":  "reconcile",
		"WITH forged AS (INSERT INTO sale_events SELECT id, 2, 'Nonsense', '{}' " +
			"FROM sales) UPDATE sales SET revision = 2": "operator",
	} {
		t.Run(damage, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t, testkit.Pool(t))
			termed(s, t)
			_, err := s.Pool.Exec(t.Context(), damage)
			require.NoError(t, err)
			report := testwork.Audit(s, t, uuid.Nil)
			require.True(t, report.Broken(), testwork.TextOf(t, report))
			require.False(t, report.Unchecked(), testwork.TextOf(t, report))
			reconciled := testwork.Reconcile(s, t)
			switch by {
			case "operator":
				require.Positive(t, reconciled.Remaining)
				return
			case "projections":
				require.Contains(t, testwork.LeftOf(reconciled), "projections")
				testwork.RebuildProjections(s, t)
				reconciled = testwork.Reconcile(s, t)
			}
			require.Zero(t, reconciled.Remaining, "%+v\n%s", reconciled, testwork.TextOf(t, report))
			testwork.ProcessWaiting(s, t)
			report = testwork.Audit(s, t, uuid.Nil)
			require.False(t, report.Broken() || report.Unchecked(), testwork.TextOf(t, report))
		})
	}
}
