package fulfillment_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/reservation"
)

// paymentWindow is the one of all sales of these tests that have one.
const paymentWindow = 10 * time.Minute

// newPayableSale inserts a sale with a payment window straight into Postgres.
func newPayableSale(t testing.TB, pool *pgxpool.Pool, stock int64) uuid.UUID {
	t.Helper()
	sale := newSale(t, pool, stock)
	_, err := pool.Exec(t.Context(), "UPDATE sales SET payment_window_seconds = $2 WHERE id = $1", sale, int64(paymentWindow/time.Second))
	require.NoError(t, err)
	return sale
}

// confirm records orders of so many users, user-1 first, and returns their ids.
func confirm(t testing.TB, pool *pgxpool.Pool, sale uuid.UUID, n int) []uuid.UUID {
	t.Helper()
	events := crowdOf(sale, n)
	outcomes, err := fulfillment.NewLedger(pool).Record(t.Context(), events)
	require.NoError(t, err)
	ids := make([]uuid.UUID, n)
	for i, out := range outcomes {
		require.Equal(t, reservation.StatusConfirmed, out.Status)
		ids[i] = out.Event.OrderID
	}
	return ids
}

// heartbeat records that an ingress runs.
func heartbeat(t testing.TB, pool *pgxpool.Pool) (outage time.Duration) {
	t.Helper()
	outage, err := fulfillment.Heartbeat{Pool: pool, Logger: testkit.Logger(t)}.Send(t.Context())
	require.NoError(t, err)
	return outage
}

// endWindow lets the time to pay for these orders be over.
func endWindow(t testing.TB, pool *pgxpool.Pool, orders ...uuid.UUID) {
	t.Helper()
	heartbeat(t, pool) // which may find that there was none for long
	tag, err := pool.Exec(t.Context(), "UPDATE orders SET due = pay_clock() - interval '1 ms' WHERE id = ANY ($1)", orders)
	require.NoError(t, err)
	require.EqualValues(t, len(orders), tag.RowsAffected())
	heartbeat(t, pool)
}

func orderOfID(t testing.TB, pool *pgxpool.Pool, id uuid.UUID) reservation.Order {
	t.Helper()
	order, err := fulfillment.NewLedger(pool).Order(t.Context(), id)
	require.NoError(t, err)
	return order
}

func TestPaymentWindowStartsAtConfirmation(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	heartbeat(t, pool)
	payable, final := newPayableSale(t, pool, 10), newSale(t, pool, 10)
	// Reserved long ago: only from now on anybody can pay.
	first, second := reserved(payable, "alice", 1), reserved(final, "alice", 1)
	var before, after time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT now()").Scan(&before))
	_, err := fulfillment.NewLedger(pool).Record(t.Context(), []reservation.OrderReserved{first, second})
	require.NoError(t, err)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT now()").Scan(&after))

	order := orderOfID(t, pool, first.OrderID)
	require.Equal(t, time.UTC, order.ExpiresAt.Location())
	require.WithinRange(t, order.ExpiresAt, before.Add(paymentWindow), after.Add(paymentWindow))
	require.Zero(t, orderOfID(t, pool, second.OrderID).ExpiresAt, "confirmed is the end of an order of a sale without a payment window")
}

func TestPayRecordsReferenceOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	sale := newPayableSale(t, pool, 10)
	order := confirm(t, pool, sale, 1)[0]
	confirmed := orderOfID(t, pool, order)

	paid, err := ledger.Pay(t.Context(), order, "user-1", "pi_1")
	require.NoError(t, err)
	want := confirmed
	want.Status, want.Version, want.PaymentReference, want.ExpiresAt = reservation.StatusPaid, 3, "pi_1", time.Time{}
	require.Equal(t, want, paid)
	require.Equal(t, want, orderOfID(t, pool, order))
	for range 3 {
		again, err := ledger.Pay(t.Context(), order, "user-1", "pi_1")
		require.NoError(t, err)
		require.Equal(t, paid, again)
	}
	_, err = ledger.Pay(t.Context(), order, "user-1", "pi_2")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition)
	require.ErrorContains(t, err, `it was paid with reference "pi_1"`)
	_, err = ledger.Cancel(t.Context(), order, "user-1")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition)

	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderPaid"}, history(t, pool, order))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		`SELECT count(*) FROM order_events WHERE version = 3 AND data = '{"reference": "pi_1"}' AND (sale_id, user_id, quantity) = ($1, 'user-1', 1)`, sale))
	require.EqualValues(t, 1, soldOf(t, pool, sale))
	require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
}

func TestCancelReleasesUnitsOnceAndAllowsNewOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	sale := newPayableSale(t, pool, 10)
	event := reserved(sale, "alice", 1)
	event.Quantity = 3
	_, err := ledger.Record(t.Context(), []reservation.OrderReserved{event, reserved(sale, "bob", 2)})
	require.NoError(t, err)

	cancelled, err := ledger.Cancel(t.Context(), event.OrderID, "alice")
	require.NoError(t, err)
	require.Equal(t, reservation.StatusCancelled, cancelled.Status)
	require.Equal(t, cancelled, orderOfID(t, pool, event.OrderID))
	again, err := ledger.Cancel(t.Context(), event.OrderID, "alice")
	require.NoError(t, err)
	require.Equal(t, cancelled, again)
	_, err = ledger.Pay(t.Context(), event.OrderID, "alice", "pi_1")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition)

	require.EqualValues(t, 1, soldOf(t, pool, sale))
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderCancelled"}, history(t, pool, event.OrderID))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		"SELECT count(*) FROM releases WHERE (order_id, sale_id, user_id, quantity) = ($1, $2, 'alice', 3)", event.OrderID, sale))

	outcomes, err := ledger.Record(t.Context(), []reservation.OrderReserved{event, reserved(sale, "alice", 3)})
	require.NoError(t, err)
	require.Equal(t, fulfillment.Outcome{Event: event, Status: reservation.StatusCancelled}, outcomes[0], "a late delivery of its event")
	require.Equal(t, reservation.StatusConfirmed, outcomes[1].Status)
	require.EqualValues(t, 2, soldOf(t, pool, sale))
}

func TestPayAndCancelRejectOrderOfAnotherUser(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	order := confirm(t, pool, newPayableSale(t, pool, 10), 1)[0]
	for name, id := range map[string]uuid.UUID{"another user's": order, "nobody's": uuid.Must(uuid.NewV7())} {
		_, err := ledger.Pay(t.Context(), id, "mallory", "pi_1")
		require.ErrorIs(t, err, reservation.ErrOrderNotFound, name)
		_, err = ledger.Cancel(t.Context(), id, "mallory")
		require.ErrorIs(t, err, reservation.ErrOrderNotFound, name)
	}
	var invalid *reservation.InvalidError
	_, err := ledger.Pay(t.Context(), order, "user-1", "")
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, history(t, pool, order))
}

func TestPayAndCancelRejectOrderWithoutPaymentWindow(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	sale := newSale(t, pool, 1)
	order := confirm(t, pool, sale, 1)[0]
	heartbeat(t, pool)
	_, err := ledger.Pay(t.Context(), order, "user-1", "pi_1")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition)
	_, err = ledger.Cancel(t.Context(), order, "user-1")
	require.ErrorIs(t, err, reservation.ErrIllegalTransition)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, history(t, pool, order))
	require.EqualValues(t, 1, soldOf(t, pool, sale))
}

func TestPayAndCancelRejectOverdueOrderBeforeSweep(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	orders := confirm(t, pool, newPayableSale(t, pool, 10), 2)
	endWindow(t, pool, orders[0])
	_, err := ledger.Pay(t.Context(), orders[0], "user-1", "pi_1")
	require.ErrorIs(t, err, reservation.ErrOrderExpired)
	_, err = ledger.Cancel(t.Context(), orders[0], "user-1")
	require.ErrorIs(t, err, reservation.ErrOrderExpired)
	require.Equal(t, reservation.StatusConfirmed, orderOfID(t, pool, orders[0]).Status, "that is the sweeper's work")

	_, err = ledger.Pay(t.Context(), orders[1], "user-2", "pi_2")
	require.NoError(t, err, "the other one is in time")
}

// While no ingress was there nobody could pay; what a buyer does before the first heartbeat is done in time.
func TestPayIsAcceptedUntilHeartbeatAfterDeadline(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	orders := confirm(t, pool, newPayableSale(t, pool, 10), 2)
	_, err := pool.Exec(t.Context(), "UPDATE pulse SET seen_at = now() - interval '60 s'")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), "UPDATE orders SET due = now() - interval '61 s' + (interval '2 s') * (user_id = 'user-1')::int")
	require.NoError(t, err)
	_, err = ledger.Pay(t.Context(), orders[0], "user-1", "pi_1")
	require.NoError(t, err, "it was in time when the outage began")
	_, err = ledger.Pay(t.Context(), orders[1], "user-2", "pi_2")
	require.ErrorIs(t, err, reservation.ErrOrderExpired, "it was overdue before")
}

func TestOrdersOfListsNewestFirst(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	var events []reservation.OrderReserved
	var want []uuid.UUID
	for i := range 25 {
		sale := newPayableSale(t, pool, 10)
		mine := reserved(sale, "alice", 1)
		events = append(events, mine, reserved(sale, fmt.Sprintf("bob-%d", i), 2))
		want = append([]uuid.UUID{mine.OrderID}, want...)
	}
	_, err := ledger.Record(t.Context(), events)
	require.NoError(t, err)
	paid, err := ledger.Pay(t.Context(), want[3], "alice", "pi_1")
	require.NoError(t, err)

	var got []uuid.UUID
	before := uuid.Nil
	for _, size := range []int{10, 10, 5, 0} {
		page, err := ledger.OrdersOf(t.Context(), "alice", before, 10)
		require.NoError(t, err)
		require.Len(t, page, size)
		for _, o := range page {
			require.Equal(t, "alice", o.UserID)
			require.Equal(t, orderOfID(t, pool, o.ID), o)
			got, before = append(got, o.ID), o.ID
		}
	}
	require.Equal(t, want, got)
	page, err := ledger.OrdersOf(t.Context(), "alice", want[2], 1)
	require.NoError(t, err)
	require.Equal(t, []reservation.Order{paid}, page)
	page, err = ledger.OrdersOf(t.Context(), "carol", uuid.Nil, 10)
	require.NoError(t, err)
	require.Empty(t, page)
}

// Somebody who changes a row without its version takes the event with him: nothing is half done.
func TestOrderChangeIsAtomic(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	ledger := fulfillment.NewLedger(pool)
	sale := newPayableSale(t, pool, 10)
	orders := confirm(t, pool, sale, 2)
	for name, breakage := range map[string]string{
		"the event is there already": `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
			VALUES ($1, 3, 'OrderPaid', '00000000-0000-0000-0000-000000000000', 'x', 1, now())`,
		"the sale has nothing to take back": "UPDATE sales SET sold = 0 WHERE id = (SELECT sale_id FROM orders WHERE id = $1)",
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Pool(t)
			ledger := fulfillment.NewLedger(pool)
			order := confirm(t, pool, newPayableSale(t, pool, 10), 1)[0]
			_, err := pool.Exec(t.Context(), breakage, order)
			require.NoError(t, err)
			events := history(t, pool, order)
			_, err = ledger.Cancel(t.Context(), order, "user-1")
			require.Error(t, err)
			require.Equal(t, fulfillment.BadData, fulfillment.FaultOf(err))
			require.ErrorIs(t, err, reservation.ErrOrderDamaged)
			require.Equal(t, reservation.StatusConfirmed, orderOfID(t, pool, order).Status)
			require.Equal(t, events, history(t, pool, order))
			require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
		})
	}

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	stale := orderOfID(t, pool, orders[0])
	_, err = ledger.Cancel(t.Context(), orders[0], "user-1")
	require.NoError(t, err)
	next, err := stale.Expired()
	require.NoError(t, err)
	err = fulfillment.WriteChange(t.Context(), tx, reservation.EventExpired, []reservation.Order{stale}, next)
	require.ErrorIs(t, err, fulfillment.ErrNotLocked)
	require.True(t, strings.HasSuffix(err.Error(), "0 of 1 are as they were read"))
}
