//go:build system

package fulfillment_test

import (
	"context"
	"sync/atomic"
	"testing"

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
