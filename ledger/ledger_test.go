package ledger

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation/order"
)

func TestLedgerConfirmsOrderWithFieldsOfEvent(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 7)
	event.Quantity = 3

	outcomes, err := ledger.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.Equal(t, []Outcome{{Event: event, Status: order.StatusConfirmed, Fresh: true}}, outcomes)

	o, err := ledger.Order(t.Context(), event.OrderID)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), o.UpdatedAt, time.Minute)
	require.Equal(t, order.Order{
		ID: event.OrderID, SaleID: sale, UserID: "alice", Quantity: 3,
		Status: order.StatusConfirmed, Version: 2, ReservedAt: event.ReservedAt, UpdatedAt: o.UpdatedAt,
	}, o)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, testshop.History(t, pool, event.OrderID))
	require.EqualValues(t, 3, testshop.SoldOf(t, pool, sale))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		`SELECT count(*) FROM order_events WHERE version = 2 AND sequence = 7 AND epoch = 1 AND reserved_at = $1`,
		event.ReservedAt))
}

func TestLedgerRepeatReturnsFirstOutcome(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 10)
	events := []order.OrderReserved{
		testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "alice", 2), testshop.Reserved(sale, "bob", 3),
	}
	first, err := ledger.Record(t.Context(), events)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, first[1].Status, "the later order of the same user")
	require.Equal(t, order.RejectedAlreadyPurchased, first[1].Reason)

	again := append(slices.Clone(events), testshop.Reserved(sale, "carol", 4), events[0])
	outcomes, err := ledger.Record(t.Context(), again)
	require.NoError(t, err)
	for i, out := range outcomes {
		require.NoError(t, out.Err)
		require.Equal(t, i == 3, out.Fresh, "event %d", i)
		if i < 3 {
			require.Equal(t, first[i].Status, out.Status)
			require.Equal(t, first[i].Reason, out.Reason)
		}
	}
	require.EqualValues(t, 3, testshop.SoldOf(t, pool, sale))
	require.EqualValues(t, 4, testshop.QueryInt(t, pool, "SELECT count(*) FROM order_events"))
}

func TestLedgerRecordsDuplicateInBatchOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	forged := event
	forged.UserID = "mallory"
	outcomes, err := New(pool).Record(t.Context(), []order.OrderReserved{event, event, forged})
	require.NoError(t, err)
	require.Equal(t, Outcome{Event: event, Status: order.StatusConfirmed, Fresh: true}, outcomes[0])
	require.Equal(t, Outcome{Event: event, Status: order.StatusConfirmed}, outcomes[1])
	require.ErrorIs(t, outcomes[2].Err, ErrContradiction)
	require.EqualValues(t, 1, testshop.SoldOf(t, pool, sale))
}

func TestLedgerRecordsOtherEventsOfBatchWithUnknownSale(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 10)
	lost := testshop.Reserved(uuid.Must(uuid.NewV7()), "alice", 1)
	outcomes, err := ledger.Record(t.Context(), []order.OrderReserved{lost, testshop.Reserved(sale, "alice", 1)})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, errUnknownSale)
	require.Equal(t, order.StatusConfirmed, outcomes[1].Status)
	_, err = ledger.Order(t.Context(), lost.OrderID)
	require.ErrorIs(t, err, order.ErrNotFound)
	require.Empty(t, testshop.History(t, pool, lost.OrderID))
}

func TestLedgerRejectsContradictingEvent(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	_, err := ledger.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	event.Quantity = 5
	outcomes, err := ledger.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, ErrContradiction)
	_, err = pool.Exec(t.Context(), "DELETE FROM orders")
	require.NoError(t, err)
	outcomes, err = ledger.Record(t.Context(), []order.OrderReserved{event})
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, ErrContradiction, "events without an order")
}

func TestLedgerNeverExceedsStock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 2)
	_, err := ledger.Record(t.Context(), testshop.CrowdOf(sale, 3))
	require.ErrorIs(t, err, errOversold)
	require.Equal(t, oversold, FaultOf(err))
	require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM order_events"), "all or nothing")
	require.Zero(t, testshop.SoldOf(t, pool, sale))
}

func TestLedgerRejectionKeepsSaleUnchanged(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	sale := testshop.NewSale(t, pool, 2)
	kept, refused := testshop.Reserved(sale, "alice", 1), testshop.Reserved(sale, "bob", 2)
	_, err := ledger.Record(t.Context(), []order.OrderReserved{kept})
	require.NoError(t, err)
	unknown := testshop.Reserved(uuid.Must(uuid.NewV7()), "carol", 1)

	outcomes, err := ledger.Refuse(t.Context(), []order.OrderReserved{kept, refused, unknown}, order.RejectedSoldOut)
	require.NoError(t, err)
	require.Equal(t, Outcome{Event: kept, Status: order.StatusConfirmed}, outcomes[0], "the recorded order is unchanged")
	for _, out := range outcomes[1:] {
		require.Equal(t, order.StatusRejected, out.Status)
		require.Equal(t, order.RejectedSoldOut, out.Reason)
		require.True(t, out.Fresh)
	}
	require.Equal(t, []string{"1 OrderReserved", "2 OrderRejected"}, testshop.History(t, pool, refused.OrderID))
	require.EqualValues(t, 1, testshop.SoldOf(t, pool, sale))
}

func TestConcurrentLedgersNeverExceedStock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := New(pool)
	const stock = 40
	sale := testshop.NewSale(t, pool, stock)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 20 {
				_, err := ledger.Record(
					context.Background(), []order.OrderReserved{testshop.Reserved(sale, fmt.Sprintf("user-%d-%d", w, i), 1)},
				)
				if err != nil && FaultOf(err) != oversold {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, stock, testshop.SoldOf(t, pool, sale))
	require.EqualValues(t, stock, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE status = 'confirmed'"))
}

func TestLedgerErrorLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testshop.NewSale(t, pool, 1)
	for range 20 {
		_, err := New(pool).Record(t.Context(), testshop.CrowdOf(sale, 2))
		require.ErrorIs(t, err, errOversold)
	}
	require.EqualValues(t, 1, pool.Stat().NewConnsCount(), "a failed batch does not close its connection")
	require.Zero(t, testshop.QueryInt(t, pool,
		"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"))
}

// BenchmarkLedger writes batches of 500 orders from one and two connections.
func BenchmarkLedger(b *testing.B) {
	for _, workers := range []int{1, 2} {
		b.Run(fmt.Sprintf("connections=%d", workers), func(b *testing.B) {
			pool := testkit.Pool(b)
			ledger := New(pool)
			const size = 500
			sale := testshop.NewSale(b, pool, order.MaxStock)
			var wg sync.WaitGroup
			b.ResetTimer()
			for w := range workers {
				wg.Go(func() {
					for i := w; i < b.N; i += workers {
						events := testshop.CrowdOf(sale, size)
						for j := range events {
							events[j].UserID = fmt.Sprintf("user-%d-%d", i, j)
						}
						if _, err := ledger.Record(context.Background(), events); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N*size)/b.Elapsed().Seconds(), "orders/s")
		})
	}
}
