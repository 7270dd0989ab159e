package ledger_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
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

func TestPaymentWindowStartsAtConfirmation(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	payable, final := testshop.NewPayableSale(t, pool, 10), testshop.NewSale(t, pool, 10)
	// Reserved long ago: they can be paid only after they are confirmed.
	first, second := testshop.Reserved(payable, "alice", 1), testshop.Reserved(final, "alice", 1)
	var before, after time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT now()").Scan(&before))
	testwork.Record(t, ledger.New(pool), []order.OrderReserved{first, second})
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT now()").Scan(&after))

	o := testwork.Order(t, pool, first.OrderID)
	require.Equal(t, time.UTC, o.ExpiresAt.Location())
	require.WithinRange(t, o.ExpiresAt, before.Add(testshop.PaymentWindow), after.Add(testshop.PaymentWindow))
	require.Zero(t, testwork.Order(t, pool, second.OrderID).ExpiresAt,
		"without a payment window, a confirmed order is final")
}

func TestPayRecordsReferenceOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	o := testwork.Confirm(t, pool, sale, 1)[0]
	confirmed := testwork.Order(t, pool, o)

	paid, err := l.Pay(t.Context(), o, "user-1", "pi_1")
	require.NoError(t, err)
	want := confirmed
	want.Status, want.Version, want.PaymentReference, want.ExpiresAt = order.StatusPaid, 3, "pi_1", time.Time{}
	require.True(t, paid.UpdatedAt.After(confirmed.UpdatedAt))
	want.UpdatedAt = paid.UpdatedAt
	require.Equal(t, want, paid)
	require.Equal(t, want, testwork.Order(t, pool, o))
	for range 3 {
		again, err := l.Pay(t.Context(), o, "user-1", "pi_1")
		require.NoError(t, err)
		require.Equal(t, paid, again)
	}
	_, err = l.Pay(t.Context(), o, "user-1", "pi_2")
	require.ErrorIs(t, err, order.ErrIllegalTransition)
	require.ErrorContains(t, err, `it was paid with reference "pi_1"`)
	_, err = l.Cancel(t.Context(), o, "user-1")
	require.ErrorIs(t, err, order.ErrIllegalTransition)

	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderPaid"}, testshop.History(t, pool, o))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		`SELECT count(*) FROM order_events WHERE version = 3 AND data = '{"reference": "pi_1"}' AND (sale_id, user_id,
			quantity) = ($1, 'user-1', 1)`, sale))
	require.EqualValues(t, 1, testshop.Sold(t, pool, sale))
	require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
}

func TestCancelReleasesUnitsOnceAndAllowsNewOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	event := testshop.Reserved(sale, "alice", 1)
	event.Quantity = 3
	testwork.Record(t, l, []order.OrderReserved{event, testshop.Reserved(sale, "bob", 2)})

	cancelled, err := l.Cancel(t.Context(), event.OrderID, "alice")
	require.NoError(t, err)
	require.Equal(t, order.StatusCancelled, cancelled.Status)
	require.Equal(t, cancelled, testwork.Order(t, pool, event.OrderID))
	again, err := l.Cancel(t.Context(), event.OrderID, "alice")
	require.NoError(t, err)
	require.Equal(t, cancelled, again)
	_, err = l.Pay(t.Context(), event.OrderID, "alice", "pi_1")
	require.ErrorIs(t, err, order.ErrIllegalTransition)

	require.EqualValues(t, 1, testshop.Sold(t, pool, sale))
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderCancelled"},
		testshop.History(t, pool, event.OrderID))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
	require.EqualValues(t, 1, testshop.QueryInt(t, pool,
		"SELECT count(*) FROM releases WHERE (order_id, sale_id, user_id, quantity) = ($1, $2, 'alice', 3)", event.OrderID,
		sale))

	outcomes := testwork.Record(t, l, []order.OrderReserved{event, testshop.Reserved(sale, "alice", 3)})
	require.Equal(
		t, ledger.Outcome{Event: event, Status: order.StatusCancelled}, outcomes[0], "a late delivery of its event",
	)
	require.Equal(t, order.StatusConfirmed, outcomes[1].Status)
	require.EqualValues(t, 2, testshop.Sold(t, pool, sale))
}

func TestPayAndCancelRejectOrderOfAnotherUser(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	o := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	for name, id := range map[string]uuid.UUID{"another user's order": o, "an unknown order": uuid.Must(uuid.NewV7())} {
		_, err := l.Pay(t.Context(), id, "mallory", "pi_1")
		require.ErrorIs(t, err, order.ErrNotFound, name)
		_, err = l.Cancel(t.Context(), id, "mallory")
		require.ErrorIs(t, err, order.ErrNotFound, name)
	}
	var invalid *order.InvalidError
	_, err := l.Pay(t.Context(), o, "user-1", "")
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed"}, testshop.History(t, pool, o))
}

// Such an order takes money at any time: nothing is refunded that belongs to it.
func TestFinalOrderTakesMoneyAndNoCancellation(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewSale(t, pool, 1)
	o := testwork.Confirm(t, pool, sale, 1)[0]
	testwork.Heartbeat(t, pool)
	_, err := l.Cancel(t.Context(), o, "user-1")
	require.ErrorIs(t, err, order.ErrIllegalTransition)
	testwork.Pay(t, l, o, "user-1", "pi_1")
	require.Equal(t, []string{"1 OrderReserved", "2 OrderConfirmed", "3 OrderPaid"}, testshop.History(t, pool, o))
	require.EqualValues(t, 1, testshop.Sold(t, pool, sale))
}

func TestPayAndCancelRejectOverdueOrderBeforeSweep(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 2)
	testwork.EndWindow(t, pool, orders[0])
	_, err := l.Pay(t.Context(), orders[0], "user-1", "pi_1")
	require.ErrorIs(t, err, order.ErrExpired)
	_, err = l.Cancel(t.Context(), orders[0], "user-1")
	require.ErrorIs(t, err, order.ErrExpired)
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, orders[0]).Status,
		"only the sweeper ends the order")

	_, err = l.Pay(t.Context(), orders[1], "user-2", "pi_2")
	require.NoError(t, err, "the other order is not overdue")
}

// Without an ingress no buyer can pay, so payments before the first heartbeat after an outage are in time.
func TestPayIsAcceptedUntilHeartbeatAfterDeadline(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 2)
	testshop.Exec(t, pool, "UPDATE pulse SET seen_at = now() - interval '60 s'")
	testshop.Exec(t, pool,
		"UPDATE orders SET due = now() - interval '61 s' + (interval '2 s') * (user_id = 'user-1')::int")
	_, err := l.Pay(t.Context(), orders[0], "user-1", "pi_1")
	require.NoError(t, err, "it was in time when the outage began")
	_, err = l.Pay(t.Context(), orders[1], "user-2", "pi_2")
	require.ErrorIs(t, err, order.ErrExpired, "it was overdue before")
}

func TestOrdersOfListsNewestFirst(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	var events []order.OrderReserved
	var want []uuid.UUID
	for i := range 25 {
		sale := testshop.NewPayableSale(t, pool, 10)
		mine := testshop.Reserved(sale, "alice", 1)
		events = append(events, mine, testshop.Reserved(sale, fmt.Sprintf("bob-%d", i), 2))
		want = append([]uuid.UUID{mine.OrderID}, want...)
	}
	testwork.Record(t, l, events)
	paid, err := l.Pay(t.Context(), want[3], "alice", "pi_1")
	require.NoError(t, err)
	// Live and ended orders alternate, and there are more of each than a page holds.
	for i := 0; i < len(want); i += 2 {
		testwork.Cancel(t, l, want[i], "alice")
	}

	var got []uuid.UUID
	before := uuid.Nil
	for _, size := range []int{10, 10, 5, 0} {
		page, next, err := l.ListOrders(t.Context(), order.Filter{User: "alice"}, before, 10)
		require.NoError(t, err)
		require.Len(t, page, size)
		if size < 10 {
			require.Zero(t, next)
		} else {
			require.Equal(t, page[9].ID, next)
		}
		for _, o := range page {
			require.Equal(t, "alice", o.UserID)
			require.Equal(t, testwork.Order(t, pool, o.ID), o.Order)
			got, before = append(got, o.ID), o.ID
		}
	}
	require.Equal(t, want, got)
	page, _, err := l.ListOrders(t.Context(), order.Filter{User: "alice"}, want[2], 1)
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, paid, page[0].Order)
	page, _, err = l.ListOrders(t.Context(), order.Filter{User: "carol"}, uuid.Nil, 10)
	require.NoError(t, err)
	require.Empty(t, page)
}

// Users are found by a beginning whatever is in it, in the order of bytes, and each page follows the one before. Live
// and ended orders alternate.
func TestOrdersAreFoundByTheBeginningOfTheirUser(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	users := []string{"a-b", "a-b-c", "a-b\u00e9", "a-b\u4e2d", "a-b\U0001f45f", "A-b", "a-", "a-c", "a_b", "ab", "a-b2"}
	var want []string
	sales := []uuid.UUID{testshop.NewPayableSale(t, pool, 99), testshop.NewPayableSale(t, pool, 99)}
	for i, user := range users {
		for _, sale := range sales {
			o := testshop.Reserved(sale, user, 1)
			testwork.Record(t, l, []order.OrderReserved{o})
			if i%2 == 0 {
				testwork.Cancel(t, l, o.OrderID, user)
			}
			if strings.HasPrefix(user, "a-b") {
				want = append(want, user)
			}
		}
	}
	slices.Sort(want)
	find := func(filter order.Filter, limit int) (found []string) {
		var last order.Order
		for {
			page, next, err := l.ListByPrefix(t.Context(), filter, last, limit)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page), limit)
			for i, o := range page {
				if before := (order.Placed{Order: last}); i > 0 || last.ID != uuid.Nil {
					if i > 0 {
						before = page[i-1]
					}
					require.True(t, before.UserID < o.UserID || before.UserID == o.UserID && o.ID.String() < before.ID.String())
				}
				found = append(found, o.UserID)
			}
			if last = next; next.ID == uuid.Nil {
				return found
			}
		}
	}
	for _, limit := range []int{1, 3, 12, 50} {
		require.Equal(t, want, find(order.Filter{User: "a-b"}, limit))
		require.Equal(t, slices.Compact(slices.Clone(want)), find(order.Filter{User: "a-b", Sale: sales[1]}, limit))
		live := find(order.Filter{User: "a-b", Status: order.StatusConfirmed}, limit)
		require.Equal(t, []string{"a-b-c", "a-b-c", "a-b\u4e2d", "a-b\u4e2d"}, live)
	}
	require.Empty(t, find(order.Filter{User: "a-bz"}, 5))
	_, _, err := l.ListByPrefix(t.Context(), order.Filter{}, order.Order{}, 5)
	require.ErrorIs(t, err, order.ErrTooWide)
	// In most other orders users who begin alike are not together.
	var collation string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT DISTINCT collation_name FROM information_schema.columns "+
		"WHERE table_name LIKE 'orders%' AND column_name = 'user_id'").Scan(&collation))
	require.Equal(t, "C", collation)
}

// If one of the writes of a change fails, none of them is done.
func TestOrderChangeIsAtomic(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 2)
	for name, breakage := range map[string]string{
		"the event exists already": `INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity,
			occurred_at)
			SELECT $1, 3, 'OrderPaid', sale_id, 'x', 1, now() FROM orders WHERE id = $1`,
		"the sale has no sold units": "UPDATE sales SET sold = 0 WHERE id = (SELECT sale_id FROM orders WHERE id = " +
			"$1)",
		"the row is ahead of its log": "UPDATE orders SET version = 9 WHERE id = $1",
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Pool(t)
			l := ledger.New(pool)
			o := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
			testshop.Exec(t, pool, breakage, o)
			events := testshop.History(t, pool, o)
			_, err := l.Cancel(t.Context(), o, "user-1")
			require.ErrorIs(t, err, order.ErrDamaged)
			require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, o).Status)
			require.Equal(t, events, testshop.History(t, pool, o))
			require.Zero(t, testshop.QueryInt(t, pool, "SELECT count(*) FROM releases"))
		})
	}

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	stale := testwork.Order(t, pool, orders[0])
	testwork.Cancel(t, l, orders[0], "user-1")
	next, err := stale.Expired()
	require.NoError(t, err)
	err = ledger.WriteExpiry(t.Context(), tx, []order.Order{stale}, next)
	require.ErrorIs(t, err, ledger.ErrNotLocked)
	require.True(t, strings.HasSuffix(err.Error(), "0 of 1 are unchanged since they were read"))
}

// The log has a row for the reservation of an order and its outcome, and the view order_history a row for each event.
func TestHistoryShowsEveryEventOfOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	testwork.Heartbeat(t, pool)
	paid, cancelled := testshop.Reserved(sale, "ann", 1), testshop.Reserved(sale, "bob", 2)
	second, refused := testshop.Reserved(sale, "ann", 3), testshop.Reserved(sale, "cid", 4)
	late := testshop.Reserved(sale, "dan", 5)
	paid.KeyFingerprint = "AAAAAAAAAAAAAAAAAAAAAA"
	testwork.Record(t, l, []order.OrderReserved{paid, cancelled, second})
	testwork.Pay(t, l, paid.OrderID, "ann", "pi_1")
	testwork.Cancel(t, l, cancelled.OrderID, "bob")
	_, err := l.Refuse(t.Context(), []order.OrderReserved{refused}, order.RejectedSoldOut)
	require.NoError(t, err)
	testshop.RaiseEpoch(t, pool, sale)
	testwork.Record(t, l, []order.OrderReserved{late})

	for _, c := range []struct {
		event order.OrderReserved
		want  []string
	}{
		{paid, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 1, "key_fingerprint": "AAAAAAAAAAAAAAAAAAAAAA"}`,
			`2 OrderConfirmed {"due": true}`, `3 OrderPaid {"reference": "pi_1"}`,
		}},
		{cancelled, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 2}`, `2 OrderConfirmed {"due": true}`, `3 OrderCancelled {}`,
		}},
		{second, []string{
			`1 OrderReserved {"epoch": 1, "sequence": 3}`, `2 OrderRejected {"reason": "already-purchased"}`,
		}},
		{refused, []string{`1 OrderReserved {"epoch": 1, "sequence": 4}`, `2 OrderRejected {"reason": "sold-out"}`}},
		{late, []string{`1 OrderReserved {"epoch": 1, "sequence": 5}`, `2 OrderVoided {"reason": "sale-rebuilt"}`}},
	} {
		require.EqualValues(t, len(c.want)-1, testshop.QueryInt(t, pool,
			"SELECT count(*) FROM order_events WHERE order_id = $1", c.event.OrderID))
		rows, err := pool.Query(t.Context(), `SELECT format('%s %s %s', version, type, data || CASE WHEN data ? 'due'
			THEN jsonb_build_object('due', (data ->> 'due')::timestamptz > now()) ELSE '{}' END),
			sale_id, user_id, quantity, occurred_at FROM order_history WHERE order_id = $1 ORDER BY version`, c.event.OrderID)
		require.NoError(t, err)
		var events []string
		for rows.Next() {
			var event, user string
			var of uuid.UUID
			var quantity int64
			var at time.Time
			require.NoError(t, rows.Scan(&event, &of, &user, &quantity, &at))
			require.Equal(t, []any{sale, c.event.UserID, int64(1)}, []any{of, user, quantity})
			require.Equal(t, len(events) == 0, at.Equal(c.event.ReservedAt), "only the reservation has its time")
			events = append(events, event)
		}
		require.NoError(t, rows.Err())
		require.Equal(t, c.want, events)
	}
}
