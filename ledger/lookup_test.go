package ledger_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

func receiptFor(e order.OrderReserved) order.Receipt {
	return order.Receipt{
		OrderID: e.OrderID, SaleID: e.SaleID, User: e.UserID, Epoch: e.Epoch, Sequence: e.Sequence,
		Quantity: e.Quantity, ReservedAt: e.ReservedAt,
	}
}

func TestFindByReceiptReturnsRecordedOrVoidedOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 10)
	here, lost := testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "bob", 2)
	testwork.Record(t, l, []order.OrderReserved{here})
	confirmed, err := l.FindByReceipt(t.Context(), receiptFor(here))
	require.NoError(t, err)
	require.Equal(t, testwork.Order(t, pool, here.OrderID), confirmed)
	_, err = l.FindByReceipt(t.Context(), receiptFor(lost))
	require.ErrorIs(t, err, order.ErrNotFound)

	testshop.Exec(t, pool, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
	got, err := l.FindByReceipt(t.Context(), receiptFor(here))
	require.NoError(t, err)
	require.Equal(t, confirmed, got, "a recorded order is returned whatever its epoch")
	got, err = l.FindByReceipt(t.Context(), receiptFor(lost))
	require.NoError(t, err)
	require.Equal(t, order.Order{
		ID: lost.OrderID, SaleID: sale, UserID: "bob", Quantity: lost.Quantity, Status: order.StatusVoided, Version: 2,
		ReservedAt: lost.ReservedAt, Reason: order.VoidedSaleRebuilt,
	}, got)

	// Its late event is recorded with the same result.
	testwork.Record(t, l, []order.OrderReserved{lost})
	late, err := l.FindByReceipt(t.Context(), receiptFor(lost))
	require.NoError(t, err)
	require.Equal(t, []any{got.Status, got.Version, got.Reason}, []any{late.Status, late.Version, late.Reason})

	// An order of the new epoch is not voided.
	fresh := testshop.Reserved(sale, "carol", 3)
	fresh.Epoch = 2
	_, err = l.FindByReceipt(t.Context(), receiptFor(fresh))
	require.ErrorIs(t, err, order.ErrNotFound)
	_, err = l.FindByReceipt(t.Context(), receiptFor(testshop.Reserved(uuid.New(), "dave", 1)))
	require.ErrorIs(t, err, order.ErrNotFound)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.FindByReceipt(cancelled, receiptFor(lost))
	require.Error(t, err)
	require.False(t, errors.Is(err, order.ErrNotFound))
}

// An order that was once reported as voided stays voided, even if its epoch ends while a transaction
// confirms it.
func TestVoidedOrderIsNeverConfirmed(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	for range 60 {
		sale := testshop.NewSale(t, pool, 10)
		event := testshop.Reserved(sale, "alice", 1)
		recorded := make(chan struct{})
		go func() {
			defer close(recorded)
			_, _ = l.Record(context.Background(), []order.OrderReserved{event}) // it may fail because the epoch has just ended
		}()
		testshop.Exec(t, pool, "UPDATE sales SET epoch = epoch + 1 WHERE id = $1", sale)
		first, err := l.FindByReceipt(t.Context(), receiptFor(event))
		require.NoError(t, err, "an ended epoch decides the order")
		<-recorded
		_, _ = l.Record(t.Context(), []order.OrderReserved{event}) // delivered again
		then, err := l.FindByReceipt(t.Context(), receiptFor(event))
		require.NoError(t, err)
		require.Equal(t, first.Status, then.Status)
	}
}

// An order that is confirmed, and whose epoch ends, between the two queries is not voided.
func TestFindByReceiptReadsEpochFirst(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	// One connection, on which the statements are prepared already: preparing them would wait for the
	// lock as well.
	one := testkit.PoolAt(t, testkit.DatabaseURL(t), 1)
	_, err := ledger.New(one).FindByReceipt(t.Context(), receiptFor(event))
	require.ErrorIs(t, err, order.ErrNotFound)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE sales IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	type answer struct {
		order order.Order
		err   error
	}
	found := make(chan answer, 1)
	go func() {
		o, err := ledger.New(one).FindByReceipt(context.Background(), receiptFor(event))
		found <- answer{o, err}
	}()
	testkit.Eventually(t, 10*time.Second, "the query waits for the sale", func() bool {
		return testshop.QueryInt(t, pool,
			"SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sales'::regclass") == 1
	})
	_, err = tx.Exec(t.Context(),
		`INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		VALUES ($1, $2, 'alice', 1, 'confirmed', 2, 1, 1, now(), now())`, event.OrderID, sale)
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "UPDATE sales SET epoch = epoch + 1, sold = 1 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	got := <-found
	require.NoError(t, got.err)
	require.Equal(t, order.StatusConfirmed, got.order.Status)
}

func TestReceiptSecretIsCreatedOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	secret, err := ledger.New(pool).ReceiptSecret(t.Context())
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(secret), order.MinReceiptSecretBytes)
	again, err := ledger.New(pool).ReceiptSecret(t.Context())
	require.NoError(t, err)
	require.Equal(t, secret, again)
}

func TestFindOrdersReturnsRecordedOrders(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewPayableSale(t, pool, 10)
	ids := testwork.Confirm(t, pool, sale, 3)
	orders, err := ledger.New(pool).FindOrders(t.Context(), append(ids, uuid.New()))
	require.NoError(t, err)
	require.Len(t, orders, 3)
	for _, o := range orders {
		require.Contains(t, ids, o.ID)
		require.Equal(t, testwork.Order(t, pool, o.ID), o)
		require.False(t, o.ExpiresAt.Before(time.Now()))
	}
	orders, err = ledger.New(pool).FindOrders(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, orders)
}

// A restore or a replication may set the sequence of positions ahead: numbers without an event cost nothing.
func TestExportOfChangesReadsRows(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10_000)
	var newest int64
	for i, ahead := range []int64{1_000_000_000, 2_000_000_000, 3_000_000_000} {
		testshop.Exec(t, pool, `WITH o AS (
				INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
				SELECT gen_random_uuid(), $1, 'user-' || n, 1, 'voided', 2, n, 1, now(), now()
				FROM generate_series($2::int * 2100 + 1, $2 * 2100 + 2100) AS n RETURNING *)
			INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			SELECT id, 2, 'OrderVoided', sale_id, user_id, 1, now() FROM o`, sale, i)
		newest = testshop.QueryInt(t, pool, "SELECT max(position) FROM order_events")
		testshop.Exec(t, pool, "SELECT setval('order_events_position_seq', $1)", ahead)
	}
	export := func(after, to int64) int {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		users := map[string]bool{}
		span := ledger.Span{ChangedAfter: after, ChangedTo: to}
		require.NoError(t, ledger.New(pool).Export(ctx, order.Filter{}, span, func(o order.Placed) error {
			require.False(t, users[o.UserID], "each once")
			users[o.UserID] = true
			return nil
		}))
		return len(users)
	}
	require.Equal(t, 6300, export(0, 3_000_000_000))
	require.Equal(t, 2100, export(1_000_000_000, newest-2100))
	require.Equal(t, 100, export(newest-100, 3_000_000_000))
}
