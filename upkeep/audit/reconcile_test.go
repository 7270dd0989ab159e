package audit_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/audit"
	"stampede/upkeep/rebuild"
)

const repairs = "SELECT count(*) FROM sale_events WHERE type IN ('SaleReconciled', 'SaleRebuilt')"

func TestReconcileIgnoresPendingWork(t *testing.T) {
	t.Parallel()
	// deliver delivers an entry to a worker that does nothing.
	deliver := func(t *testing.T, s *testshop.Shop) order.OrderReserved {
		read, err := s.Rdb.XReadGroup(t.Context(), &redis.XReadGroupArgs{
			Group: reservation.Group, Consumer: "hangs", Streams: []string{s.Keys.Orders(0), ">"}, Block: -1,
		}).Result()
		require.NoError(t, err)
		entry := read[0].Messages[0]
		events, err := deadletter.OrdersOf(stream.Entry{
			Stream: s.Keys.Orders(0), ID: entry.ID,
			Fields: stream.FieldsOf(entry.Values),
		})
		require.NoError(t, err)
		return events[0]
	}
	for name, c := range map[string]struct {
		happens func(*testing.T, *testshop.Shop, uuid.UUID)
		left    string
	}{
		"nothing": {func(*testing.T, *testshop.Shop, uuid.UUID) {}, ""},
		"an unread order": {
			func(t *testing.T, s *testshop.Shop, sale uuid.UUID) { s.Buy(t, sale, "ann") },
			"worker",
		},
		"a pending order": {func(t *testing.T, s *testshop.Shop,
			sale uuid.UUID,
		) {
			s.Buy(t, sale, "ann")
			deliver(t, s)
		}, "worker"},
		"a pending order and an unread one": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			s.Buy(t, sale, "ann")
			deliver(t, s)
			s.Buy(t, sale, "bob")
		}, "worker"},
		"a refused order before its release": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			s.Buy(t, sale, "ann")
			_, err := ledger.New(s.Pool).Refuse(t.Context(), []order.OrderReserved{deliver(t, s)}, order.RejectedSoldOut)
			require.NoError(t, err)
		}, "worker"},
		"a dead letter": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			s.Buy(t, sale, "ann")
			deliver(t, s)
			key := s.Keys.Orders(0)
			last, err := s.Rdb.XRevRangeN(t.Context(), key, "+", "-", 1).Result()
			require.NoError(t, err)
			entry := stream.Entry{Stream: key, ID: last[0].ID, Fields: stream.FieldsOf(last[0].Values)}
			require.NoError(t, deadletter.NewStore(s.Pool, s.Rdb, s.Store).Park(t.Context(), entry, fmt.Errorf("no reason")))
			require.NoError(t, s.Rdb.XAck(t.Context(), key, reservation.Group, entry.ID).Err())
		}, "dlq"},
		"a cancelled order": {func(t *testing.T, s *testshop.Shop, _ uuid.UUID) {
			sale := s.OpenPayable(t, 5)
			s.Buy(t, sale, "ann")
			id := testwork.Fulfil(t, s)[0].Event.OrderID
			testwork.Cancel(t, ledger.New(s.Pool), id, "ann")
		}, ""},
		"a higher stock": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Exec(t, `WITH s AS (UPDATE sales SET stock = 50, revision = 2 WHERE id = $1)
				INSERT INTO sale_events (sale_id, revision, type, data) VALUES ($1, 2, 'SaleRestocked', '{"stock": 50}')`, sale))
		}, "worker"},
		"an unpublished sale": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale)).Err())
			require.NoError(t, s.Exec(t,
				`DELETE FROM order_events; DELETE FROM orders; UPDATE sales SET sold = 0, last_sequence = 0, published_revision =
					0`))
		}, "worker"},
		"an ended sale with deleted keys": {func(t *testing.T, s *testshop.Shop, sale uuid.UUID) {
			_, err := s.Catalog.End(t.Context(), sale)
			require.NoError(t, err)
			require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale)).Err())
			testwork.RequireUnbroken(t, s, sale)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.Open(t, 40)
			s.Buy(t, sale, "zoe")
			testwork.Fulfil(t, s)
			c.happens(t, s, sale)
			before := s.Everything(t)
			report := testwork.Reconcile(t, s)
			require.Equal(t, c.left, testwork.Unmended(report), "%+v", report)
			require.Equal(t, before, s.Everything(t))
		})
	}
}

// afterHScan returns a hook that calls do after each HSCAN of buyers.
func afterHScan(do func()) testkit.Hook {
	return func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == "hscan" && strings.Contains(cmd.String(), ":buyers:") {
			do()
		}
		return err
	}
}

// A difference of the first look that the second one does not find was in transit.
func TestReconcileAuditsTwice(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.OpenPayable(t, 10)
	s.Crowd(t, sale, 3)
	outcomes := testwork.Fulfil(t, s)
	require.NoError(t, s.Exec(t, "INSERT INTO releases SELECT gen_random_uuid(), $1, 'ghost', 1", sale))
	config := testwork.ReconcileConfig(t, s)
	rdb, err := connect.Control(testkit.RedisURL(t))
	require.NoError(t, err)
	defer func() { _ = rdb.Close() }()
	// In each look an order ends after the buyers were read, and its units are released before Postgres is read.
	rdb.AddHook(afterHScan(func() {
		event := outcomes[0].Event
		outcomes = outcomes[1:]
		testwork.Cancel(t, ledger.New(s.Pool), event.OrderID, event.UserID)
		require.NoError(t, s.Exec(t, "DELETE FROM releases WHERE order_id = $1", event.OrderID))
		_, err = s.Store.Release(t.Context(),
			[]reservation.Release{{SaleID: sale, OrderID: event.OrderID, UserID: event.UserID}})
		require.NoError(t, err)
	}))
	config.Catalog = s.Next(t, rdb).Catalog
	looks := 0
	config.Explain = func(f audit.Finding) error {
		looks++
		require.Equal(t, audit.RemedyForget, f.Remedy, "only lasting differences: %s", f)
		return nil
	}
	report, err := audit.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, 1, looks)
	require.Len(t, outcomes, 1, "two looks")
	require.Zero(t, report.Remaining)
	testwork.RequireUnbroken(t, s, sale)
}

// The appended event equals the lost one, which may still arrive.
func TestReconcileAppendsLostEventOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale, key := s.OpenPayable(t, 10), s.Keys.Orders(0)
	s.Buy(t, sale, "before")
	testwork.Fulfil(t, s)
	lost := s.Attempt(t, sale, "ann", 3, "key").Reservation
	entries, err := s.Rdb.XRevRangeN(t.Context(), key, "+", "-", 1).Result()
	require.NoError(t, err)
	// A consumer acknowledges the entry without recording it.
	require.NoError(t, s.Rdb.XReadGroup(t.Context(),
		&redis.XReadGroupArgs{Group: reservation.Group, Consumer: "lies", Streams: []string{key, ">"}, Block: -1}).Err())
	require.NoError(t, s.Rdb.XAck(t.Context(), key, reservation.Group, entries[0].ID).Err())

	report := testwork.Reconcile(t, s)
	require.Len(t, report.Remedies, 1, "%+v", report)
	require.Equal(t, audit.RemedyReport{Remedy: audit.RemedyAppend, Says: audit.RemedyAppend.Says(), Found: 1, Mended: 1},
		report.Remedies[0])
	require.Equal(t, []string{`{"appended": ["` + lost.OrderID.String() + `"]}`},
		testshop.Rows(t, s.Pool, "SELECT data::text FROM sale_events WHERE type = 'SaleReconciled'"))
	again, err := s.Rdb.XRevRangeN(t.Context(), key, "+", "-", 1).Result()
	require.NoError(t, err)
	require.Equal(t, entries[0].Values, again[0].Values)
	length := s.Rdb.XLen(t.Context(), key).Val()
	require.Equal(t, "worker", testwork.Unmended(testwork.Reconcile(t, s)), "its event is in the stream")
	require.Equal(t, length, s.Rdb.XLen(t.Context(), key).Val())

	// The lost event arrives.
	require.NoError(t, s.Rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: entries[0].Values}).Err())
	testwork.Fulfil(t, s)
	o := testwork.Order(t, s.Pool, lost.OrderID)
	require.Equal(t, order.StatusConfirmed, o.Status)
	require.Equal(t, lost.ReservedAt, o.ReservedAt)
	require.EqualValues(t, 3, o.Quantity)
	require.Equal(t, []string{fmt.Sprintf("%d 1 t", lost.Sequence)}, testshop.Rows(t, s.Pool,
		"SELECT concat_ws(' ', sequence, epoch, key_fingerprint IS NOT NULL) FROM orders WHERE user_id = 'ann'"))
	require.EqualValues(t, 4, testshop.Sold(t, s.Pool, sale))
	testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Equal(t, reservation.Replayed, s.Attempt(t, sale, "ann", 3, "key").Verdict)

	// Operators can still change the sale.
	_, err = s.Catalog.Pause(t.Context(), sale)
	require.NoError(t, err)
	require.Equal(t, "paused", s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "state").Val())
}

func TestReconcileAppendsBeforeRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "before")
	testwork.Fulfil(t, s)
	o := s.Buy(t, sale, "ann")
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Orders(0)).Err())
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(0, sale), "left", 3).Err())
	report := testwork.Reconcile(t, s)
	require.Empty(t, testwork.Unmended(report), "%+v", report)
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, s.Pool, o).Status)
	require.EqualValues(t, 8, s.Left(t, sale))
	testwork.ProcessWaiting(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	require.Empty(t, testwork.Reconcile(t, s).Remedies)
}

func TestConcurrentReconcilesRepairOnce(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	const lost = 2*audit.RepairsPerTurn + 7
	require.Equal(t, lost, s.Crowd(t, s.Open(t, lost), lost))
	require.NoError(t, s.Rdb.XTrimMaxLen(t.Context(), s.Keys.Orders(0), 0).Err())
	var mended, refused atomic.Int64
	var all sync.WaitGroup
	config := testwork.ReconcileConfig(t, s)
	for range 4 {
		all.Go(func() {
			report, err := audit.Reconcile(t.Context(), config)
			if err != nil {
				require.ErrorIs(t, err, audit.ErrRunning)
				refused.Add(1)
				return
			}
			for _, r := range report.Remedies {
				mended.Add(r.Mended)
			}
		})
	}
	all.Wait()
	require.Positive(t, refused.Load())
	require.EqualValues(t, lost, mended.Load())
	require.Len(t, s.Events(t, 0), lost)
	require.EqualValues(t, 3, s.Count(t, repairs))
	testwork.Fulfil(t, s)
	testwork.RequireUnbroken(t, s, uuid.Nil)
}

// requireFlushRepairedOnce empties Redis and requires that one rebuild of each sale repairs it.
func requireFlushRepairedOnce(t *testing.T, s *testshop.Shop, sales int) {
	t.Helper()
	s.Flush(t)
	report := testwork.Reconcile(t, s)
	require.Empty(t, testwork.Unmended(report), "%+v", report)
	testwork.RequireUnbroken(t, s, uuid.Nil)
	require.EqualValues(t, sales, s.Count(t, repairs))
}

func TestReconcileRebuildsEmptiedRedisOnce(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sales := []uuid.UUID{s.Open(t, 10), s.Open(t, 10), s.Open(t, 10)}
	for _, sale := range sales {
		s.Crowd(t, sale, 4)
	}
	testwork.Fulfil(t, s)
	requireFlushRepairedOnce(t, s, len(sales))
	for _, sale := range sales {
		require.EqualValues(t, 6, s.Left(t, sale))
	}
}

// Operators change the sale during both looks, so each look finds another difference.
func TestReconcileIgnoresSaleThatChangesBetweenAudits(t *testing.T) {
	t.Parallel()
	pause := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Catalog.Pause(context.Background(), sale)
		return err
	}
	resume := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Catalog.Resume(context.Background(), sale)
		return err
	}
	restock := func(units int64) func(*testshop.Shop, uuid.UUID) error {
		return func(s *testshop.Shop, sale uuid.UUID) error {
			_, err := s.Catalog.Restock(context.Background(), sale, units, "")
			return err
		}
	}
	rebuildSale := func(s *testshop.Shop, sale uuid.UUID) error {
		_, err := testwork.Rebuilder(t, s).Sale(context.Background(), sale, rebuild.ReasonByHand)
		return err
	}
	for name, changes := range map[string][]func(*testshop.Shop, uuid.UUID) error{
		"a restock and a pause":       {restock(5), pause},
		"two restocks":                {restock(5), restock(5)},
		"a restock and a lower stock": {restock(5), restock(-5)},
		"a pause and a resume":        {pause, resume},
		"two rebuilds":                {rebuildSale, rebuildSale},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale := s.OpenPayable(t, 10)
			s.Crowd(t, sale, 3)
			testwork.Fulfil(t, s)
			rdb, err := connect.Control(testkit.RedisURL(t))
			require.NoError(t, err)
			defer func() { _ = rdb.Close() }()
			left := changes
			rdb.AddHook(afterHScan(func() {
				change := left[0]
				left = left[1:]
				require.NoError(t, change(s, sale))
			}))
			config := testwork.ReconcileConfig(t, s)
			config.Catalog = s.Next(t, rdb).Catalog
			config.Explain = func(f audit.Finding) error {
				require.Equal(t, audit.RemedyWorker, f.Remedy, "no difference lasts: %s", f)
				return nil
			}
			report, err := audit.Reconcile(t.Context(), config)
			require.NoError(t, err)
			require.Empty(t, left, "two looks")
			require.Zero(t, report.Remaining)
			require.Zero(t,
				s.Count(t, "SELECT count(*) FROM sale_events WHERE type = 'SaleReconciled' OR data ->> 'reason' = 'reconciled'"),
				"nothing was repaired")
			testwork.RequireUnbroken(t, s, sale)
		})
	}
}
