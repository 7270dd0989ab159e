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
)

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
				Pool: s.Pool, Keys: s.Keys, Sale: sale, Wait: wait,
				Redis: movingRedis(t, func() {
					testwork.Cancel(t, ledger.New(s.Pool), event.OrderID, event.UserID)
					testwork.ReleaseUnits(t, s)
				}),
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
	report, err := audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: moving(), Keys: s.Keys, Sale: sale})
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
	report, err := audit.Run(ctx, audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Sale: sale, Wait: time.Hour})
	require.NoError(t, err)
	require.Equal(t, "S4", testwork.Broken(report))
	require.False(t, report.Moved)
}
