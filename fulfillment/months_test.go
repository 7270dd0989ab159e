package fulfillment_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/upkeep/audit"
)

// A worker creates the tables of the next month.
func TestWorkerMakesMonthsAhead(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	const complete = "SELECT count(*) FROM order_months WHERE first > '01800000-0000-0000-0000-000000000000' AND " +
		"orders IS NOT NULL AND events IS NOT NULL"
	made := s.Count(t, complete)
	_, err := s.Pool.Exec(t.Context(), `DO $$
		DECLARE part text := (SELECT events FROM order_months ORDER BY first DESC LIMIT 1);
		BEGIN EXECUTE 'DROP TABLE ' || part; END $$`)
	require.NoError(t, err)
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Len(t, missing, 1)
	require.Contains(t, missing[0].What, "the table order_events has no part for the sales of")
	testwork.Work(t, testwork.Config(s, t))
	testkit.Eventually(t, testshop.Soon, "the month is complete", func() bool { return s.Count(t, complete) == made })
}

// The tables of a sale were removed manually: the next order creates them.
func TestOrderIsRecordedWithoutTables(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	l := ledger.New(s.Pool)
	sale := oldSale(t, s)
	_, err := s.Pool.Exec(t.Context(), "DROP TABLE orders_2026_03, order_events_2026_03")
	require.NoError(t, err)
	outcomes, err := l.Record(t.Context(), testshop.CrowdOf(sale, 3))
	require.NoError(t, err)
	require.Equal(t, order.StatusConfirmed, outcomes[2].Status)

	unknown := testshop.Reserved(uuid.MustParse("01c30000-0000-7000-8000-000000001234"), "stranger", 1)
	outcomes, err = l.Refuse(t.Context(), []order.OrderReserved{unknown}, order.RejectedSoldOut)
	require.NoError(t, err, "of a sale that Postgres never had")
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
}

// oldSale makes an open sale of March 2026, which is in tables of its own.
func oldSale(t *testing.T, s *testshop.Shop) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	ms := time.Date(2026, time.March, 7, 0, 0, 0, 0, time.UTC).UnixMilli()
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i)))
	}
	_, err := s.Pool.Exec(t.Context(), "DROP TABLE orders_first, order_events_first") // they have all earlier months
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "INSERT INTO sales (id, name, stock) VALUES ($1, 'old', 1000)", id)
	require.NoError(t, err)
	return id
}

// archiveMarch marks March as archived, and returns the statements that detach its tables.
func archiveMarch(t *testing.T, s *testshop.Shop) ([]string, error) {
	t.Helper()
	rows, _ := s.Pool.Query(t.Context(), "SELECT archive_month('2026-03-01')") // its error comes with the rows
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// A month is archived as docs/operations.md shows, while orders are recorded and paid, and while a long transaction
// reads orders, for which the detaching waits. No other session ever waits for the lock of a table.
func TestMonthIsArchivedWhileOrdersAreWritten(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	l := ledger.New(s.Pool)
	sale := oldSale(t, s)
	archived := testshop.CrowdOf(sale, 300)
	_, err := l.Record(t.Context(), archived)
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE sales SET state = 'ended', published_revision = 1, retired_at = now() "+
		"WHERE id = $1", sale)
	require.NoError(t, err)

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var all errgroup.Group
	var recorded, blocked atomic.Int64
	for range 2 {
		current := testshop.NewPayableSale(t, s.Pool, 1_000_000)
		all.Go(func() error {
			for n := int64(0); ctx.Err() == nil; n++ {
				user := uuid.NewString()
				event := testshop.Reserved(current, user, n+1)
				if _, err := l.Record(t.Context(), []order.OrderReserved{event}); err != nil {
					return err
				}
				if _, err := l.Pay(t.Context(), event.OrderID, user, "pi"); err != nil {
					return err
				}
				if _, _, err := l.ListOrders(t.Context(), order.Filter{User: user}, uuid.Nil, 20); err != nil {
					return err
				}
				recorded.Add(1)
			}
			return nil
		})
	}
	all.Go(func() error {
		for ctx.Err() == nil {
			var n int64
			err := s.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
				WHERE NOT granted AND locktype = 'relation' AND datname = current_database()
				AND query NOT LIKE 'ALTER TABLE%' AND waitstart < clock_timestamp() - interval '1 second'`).Scan(&n)
			if err != nil {
				return err
			}
			blocked.Add(n)
		}
		return nil
	})
	progress := func(what string) {
		t.Helper()
		at := recorded.Load()
		testkit.Eventually(t, testshop.Soon, what, func() bool { return recorded.Load() > at+20 })
	}
	progress("orders are written")

	reader, err := s.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	t.Cleanup(func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) })
	var seen int
	require.NoError(t, reader.QueryRow(t.Context(), "SELECT count(*) FROM orders WHERE sale_id = $1", sale).Scan(&seen))
	statements, err := archiveMarch(t, s)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"ALTER TABLE orders DETACH PARTITION orders_2026_03 CONCURRENTLY",
		"ALTER TABLE order_events DETACH PARTITION order_events_2026_03 CONCURRENTLY",
	}, statements)
	var detaching errgroup.Group
	detaching.Go(func() error {
		for _, statement := range statements {
			if _, err := s.Pool.Exec(t.Context(), statement); err != nil {
				return err
			}
		}
		return nil
	})
	testkit.Eventually(t, testshop.Soon, "the detaching waits for the reader", func() bool {
		return s.Count(t, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'ALTER TABLE%' AND wait_event_type = "+
			"'Lock' AND datname = current_database()") > 0
	})
	progress("orders are written while the detaching waits")
	require.NoError(t, reader.Rollback(t.Context()))
	require.NoError(t, detaching.Wait())
	progress("orders are written after the detaching")
	stop()
	require.NoError(t, all.Wait())
	// The last step locks the detached table for a moment.
	require.Zero(t, blocked.Load(), "sessions that waited for the lock of a table for a second")

	require.EqualValues(t, 300, s.Count(t, "SELECT count(*) FROM orders_2026_03"))
	require.EqualValues(t, 300, s.Count(t, "SELECT count(*) FROM order_events_2026_03"))
	left, err := archiveMarch(t, s)
	require.NoError(t, err)
	require.Empty(t, left, "a repeat has nothing to do")
	_, err = s.Pool.Exec(t.Context(), "SELECT archive_month(now()::date)")
	require.ErrorContains(t, err, "sales of this month can still be created")
	requireArchived(t, s, archived)
}

// requireArchived checks what the programs say of archived orders.
func requireArchived(t *testing.T, s *testshop.Shop, archived []order.OrderReserved) {
	t.Helper()
	l := ledger.New(s.Pool)
	e := archived[0]
	_, err := l.FindByReceipt(t.Context(), order.Receipt{SaleID: e.SaleID, OrderID: e.OrderID, User: e.UserID, Epoch: 1})
	require.ErrorIs(t, err, order.ErrArchived)
	_, err = l.Order(t.Context(), e.OrderID)
	require.ErrorIs(t, err, order.ErrNotFound)
	_, _, err = l.History(t.Context(), e.OrderID)
	require.ErrorIs(t, err, order.ErrArchived)
	_, err = l.Withdraw(t.Context(), e.OrderID, "too late", "ann")
	require.ErrorIs(t, err, order.ErrArchived)
	of, _, err := l.ListOrders(t.Context(), order.Filter{User: e.UserID}, uuid.Nil, 20)
	require.NoError(t, err)
	require.Empty(t, of)

	_, err = l.Record(t.Context(), []order.OrderReserved{testshop.Reserved(e.SaleID, "late", 301)})
	require.ErrorContains(t, err, "the orders of sales of 2026-03 are archived")
	require.Equal(t, ledger.BadData, ledger.FaultOf(err), "it becomes a dead letter")
	_, err = l.Record(t.Context(), archived[:1])
	require.ErrorContains(t, err, "archived", "an order that was recorded before")

	report := testwork.RebuildProjections(s, t)
	require.Zero(t, report.Replaced)
	require.Empty(t, report.Recounted)
	require.EqualValues(t, 300, testshop.SoldOf(t, s.Pool, e.SaleID))
	_, err = audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Sale: e.SaleID})
	require.ErrorIs(t, err, order.ErrArchived)
	audited := testwork.Audit(s, t, uuid.Nil)
	require.NotContains(t, testwork.TextOf(t, audited), e.SaleID.String())
	_, missing, err := sql.Guards(t.Context(), s.Pool)
	require.NoError(t, err)
	require.Empty(t, missing)
}
