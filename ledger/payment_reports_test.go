package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// A buyer's page and the webhook of the provider tell of the same money: in either order, and whatever became of the
// order in between, it is one payment, under the provider's reference.
func TestMoneyThatIsReportedInTwoWaysCountsOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 20)
	orders := testwork.Confirm(t, pool, sale, 8)
	for i, id := range orders {
		user, reference := fmt.Sprint("user-", i+1), newReference()
		shop := func() order.Payment {
			p, err := l.Report(t.Context(), order.Money{Reference: reference, OrderID: id})
			require.NoError(t, err)
			require.Equal(t, reference, p.Reference)
			return p
		}
		page := func() { _, _ = l.Pay(t.Context(), id, user, reference) } // it may be refused
		withdraw := func() {
			_, err := l.Withdraw(t.Context(), id, "a mistake", "zoe")
			require.NoError(t, err)
		}
		want := order.PaymentRefundDue
		switch i {
		case 0: // the page first
			page()
			shop()
			want = order.PaymentSettled
		case 1: // the webhook first
			shop()
			page()
			want = order.PaymentSettled
		case 2: // cancelled between the page and the webhook
			page()
			withdraw()
			shop()
		case 3: // and the other way round
			shop()
			withdraw()
			page()
		case 4: // both too late
			withdraw()
			shop()
			page()
		case 5:
			withdraw()
			page()
			shop()
		case 6: // the claim was refunded by hand before
			page()
			withdraw()
			_, err := l.Refund(t.Context(), id.String()+":"+reference, "re_1", "zoe")
			require.NoError(t, err)
			require.Equal(t, "re_1", shop().RefundReference)
			want = order.PaymentRefunded
		case 7: // several times each
			page()
			shop()
			page()
			withdraw()
			shop()
			page()
		}
		require.Equal(t, want, shop().State, i)
		all, _, err := l.ListPayments(t.Context(), order.PaymentFilter{Order: id}, 0, 10)
		require.NoError(t, err)
		counting := slices.DeleteFunc(all, func(p order.Payment) bool { return p.State == order.PaymentClaimed })
		require.Len(t, counting, 1, i)
	}
	requireNoMoneyLost(t, pool)
}

// What a buyer says of an order that cannot take it makes no refund due, and only some of it is kept.
func TestBuyersWordsAreNoMoney(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	id := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	testwork.Cancel(t, l, id, "user-1")
	for i := range 20 {
		for range 2 {
			_, err := l.Pay(t.Context(), id, "user-1", fmt.Sprint("x", i))
			require.ErrorIs(t, err, order.ErrIllegalTransition)
		}
		_, err := l.Pay(t.Context(), id, "user-2", fmt.Sprint("y", i))
		require.ErrorIs(t, err, order.ErrNotFound)
	}
	due, err := l.RefundsDue(t.Context())
	require.NoError(t, err)
	require.Empty(t, due)
	claims, _, err := l.ListPayments(t.Context(), order.PaymentFilter{State: order.PaymentClaimed}, 0, 100)
	require.NoError(t, err)
	require.Len(t, claims, 5)
	require.Equal(t, order.RefundOrderCancelled, claims[0].Reason)
	// The shop's word counts, also of what the buyer has claimed.
	known := order.Money{Reference: "x0", OrderID: id, Amount: 5, Currency: "EUR"}
	report(t, l, known, "refund_due", order.RefundOrderCancelled)
	requireNoMoneyLost(t, pool)
}

// A repeat that says something else is kept, and answered as what it is: unclear, until a person has looked.
func TestContradictingRepeatsAreKept(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 3)
	money := func(reference string, o uuid.UUID, amount int64) order.Money {
		return order.Money{Reference: reference, OrderID: o, Amount: amount, Currency: "EUR"}
	}
	first := newReference()
	report(t, l, money(first, orders[0], 1250), "settled", "")
	for range 2 {
		report(t, l, money(first, orders[1], 1250), "unclear", order.UnclearOtherOrder)
		report(t, l, money(first, orders[0], 999), "unclear", order.UnclearOtherAmount)
		unreadable := order.Money{Reference: first, OrderID: orders[0], Unreadable: "amount x"}
		report(t, l, unreadable, "unclear", order.UnclearOtherAmount)
		report(t, l, order.Money{Reference: first, OrderID: orders[0]}, "settled", "") // it says nothing else
	}
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, orders[1]).Status)

	// The buyer has named the reference, and the shop has received one cent with it.
	testshop.Exec(t, pool, "UPDATE sales SET unit_price = 1250, currency = 'EUR' WHERE id = $1", sale)
	cent := newReference()
	testwork.Pay(t, l, orders[2], "user-3", cent)
	p := report(t, l, money(cent, orders[2], 1), "unclear", order.UnclearOtherAmount)
	require.Equal(t, cent, p.Reference)
	require.Equal(t, order.StatusPaid, testwork.Order(t, pool, orders[2]).Status)

	unclear, _, err := l.ListPayments(t.Context(), order.PaymentFilter{State: order.PaymentUnclear}, 0, 10)
	require.NoError(t, err)
	require.Len(t, unclear, 4)
	for range 2 {
		p, err = l.Dismiss(t.Context(), cent, "it was a test", "zoe")
		require.NoError(t, err)
		require.Equal(t, []any{order.PaymentDismissed, "it was a test", "zoe"}, []any{p.State, p.Note, p.Operator})
		p, err = l.Refund(t.Context(), unclear[0].Reference, "re_1", "zoe")
		require.NoError(t, err)
		require.Equal(t, order.PaymentRefunded, p.State)
	}
	_, err = l.Dismiss(t.Context(), first, "no", "zoe")
	require.ErrorIs(t, err, order.ErrNotUnclear)
	requireNoMoneyLost(t, pool)
}

// A report that could not be read does not keep the right one away.
func TestReportThatCanBeReadMends(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 2)
	late := testshop.Reserved(sale, "late", 3)
	for i, m := range []order.Money{
		{Reference: newReference(), Unreadable: `order_id "x"`},
		{Reference: newReference(), OrderID: orders[1], Unreadable: "amount 4.5"},
		{Reference: newReference()},
	} {
		report(t, l, m, "refund_due", map[bool]order.PaymentReason{
			true: order.RefundAmountMismatch, false: order.RefundOrderNotFound,
		}[i == 1])
		report(t, l, m, "refund_due", map[bool]order.PaymentReason{
			true: order.RefundAmountMismatch, false: order.RefundOrderNotFound,
		}[i == 1])
		right := order.Money{Reference: m.Reference, OrderID: append(orders, late.OrderID)[i], Amount: 5, Currency: "EUR"}
		if i == 2 {
			report(t, l, right, "waiting", "")
			testwork.Record(t, l, []order.OrderReserved{late})
		}
		report(t, l, right, "settled", "")
		report(t, l, right, "settled", "")
		right.Amount = 7
		report(t, l, right, "unclear", order.UnclearOtherAmount)
	}
	requireNoMoneyLost(t, pool)
}

// Refunds and disputes at the payment provider are kept, and the order stays as it is.
func TestProviderRefundsAndDisputes(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 20)
	orders := testwork.Confirm(t, pool, sale, 5)
	money := func(reference string, o uuid.UUID) order.Money {
		return order.Money{Reference: reference, OrderID: o, Amount: 1250, Currency: "EUR"}
	}
	is := func(p order.Payment, err error, state order.PaymentState, reason order.PaymentReason) {
		t.Helper()
		require.NoError(t, err)
		require.Equal(t, [2]any{state, reason}, [2]any{p.State, p.Reason})
		found, err := l.Payment(t.Context(), p.Reference)
		require.NoError(t, err)
		require.Equal(t, found, p)
	}
	refund := func(m order.Money, amount int64, state order.PaymentState, reason order.PaymentReason) {
		t.Helper()
		for range 2 {
			r := order.ProviderRefund{Money: m, RefundReference: "re_1", Refunded: amount, By: "stripe"}
			p, err := l.RefundedAtProvider(t.Context(), r)
			is(p, err, state, reason)
		}
	}
	dispute := func(reference string, s order.DisputeState, state order.PaymentState, reason order.PaymentReason) {
		t.Helper()
		for range 2 {
			p, err := l.Disputed(t.Context(), order.Dispute{Reference: reference, ID: "dp_" + reference, State: s})
			is(p, err, state, reason)
		}
	}
	for i, reference := range []string{"a", "b", "c", "d"} {
		report(t, l, money(reference, orders[i]), "settled", "")
	}
	refund(money("a", orders[0]), 500, "settled", "")
	refund(money("a", orders[0]), 1250, "refunded", order.RefundedOutside)
	report(t, l, money("late", orders[0]), "refund_due", order.RefundAlreadyPaid)
	refund(money("late", orders[0]), 500, "refund_due", order.RefundAlreadyPaid)
	dispute("late", order.DisputeOpen, "disputed", order.RefundAlreadyPaid)
	dispute("late", order.DisputeWon, "refund_due", order.RefundAlreadyPaid)
	refund(money("late", orders[0]), 1250, "refunded", order.RefundAlreadyPaid)
	refund(money("unheard", orders[4]), 1250, "refunded", order.RefundedOutside)
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, orders[4]).Status)
	refund(money("part", orders[4]), 1, "settled", "")

	dispute("b", order.DisputeOpen, "disputed", "")
	dispute("b", order.DisputeWon, "settled", "")
	dispute("b", order.DisputeOpen, "settled", "") // a late repeat
	dispute("c", order.DisputeOpen, "disputed", "")
	dispute("c", order.DisputeLost, "refunded", order.RefundedOutside)
	dispute("d", order.DisputeOpen, "disputed", "")
	_, err := l.Withdraw(t.Context(), orders[3], "a mistake", "zoe")
	require.NoError(t, err)
	dispute("d", order.DisputeWon, "refund_due", order.RefundOrderCancelled)
	_, err = l.Disputed(t.Context(), order.Dispute{Reference: "unknown", ID: "dp"})
	require.ErrorIs(t, err, order.ErrPaymentNotFound)
	for _, i := range []int{0, 1, 2} {
		require.Equal(t, order.StatusPaid, testwork.Order(t, pool, orders[i]).Status)
	}
	requireNoMoneyLost(t, pool)
}

// Reports that come together leave together, and each one gets its own answer. One whose order is locked holds up no
// other.
func TestReportsThatComeTogetherAreDecidedTogether(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 1000)
	orders := testwork.Confirm(t, pool, sale, 200)
	locking, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = locking.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", orders[0])
	require.NoError(t, err)
	var all errgroup.Group
	blocked := make(chan error, 1)
	go func() {
		_, err := l.Report(t.Context(), order.Money{Reference: "pi_0", OrderID: orders[0]})
		blocked <- err
	}()
	for i := 1; i < len(orders); i++ {
		all.Go(func() error {
			want := []any{order.PaymentSettled, order.PaymentReason(""), fmt.Sprint("pi_", i)}
			m := order.Money{Reference: fmt.Sprint("pi_", i), OrderID: orders[i]}
			switch i % 10 {
			case 1: // the same order twice at once
				m.OrderID = orders[i+1]
				want = nil
			case 2:
				want = nil
			case 3:
				m.OrderID = order.NewOrderID(sale)
				want = []any{order.PaymentWaiting, order.PaymentReason(""), m.Reference}
			case 4:
				m.OrderID = uuid.Nil
				want = []any{order.PaymentRefundDue, order.RefundOrderNotFound, m.Reference}
			}
			p, err := l.Report(t.Context(), m)
			if got := []any{p.State, p.Reason, p.Reference}; err == nil && want != nil && !slices.Equal(got, want) {
				return fmt.Errorf("%d: %v, not %v", i, got, want)
			}
			return err
		})
	}
	require.NoError(t, all.Wait())
	require.NoError(t, locking.Rollback(t.Context()))
	require.NoError(t, <-blocked)
	count := func(query string) int64 { return testshop.QueryInt(t, pool, query) }
	require.EqualValues(t, 20, count("SELECT count(*) FROM payments WHERE reason = 'already-paid'"))
	require.EqualValues(t, 140, count("SELECT count(*) FROM orders WHERE status = 'paid'"))
	require.Less(t, count("SELECT count(DISTINCT occurred_at) FROM payment_events"), int64(60), "transactions")
	requireNoMoneyLost(t, pool)
}

// A caller that gives up leaves the line, and the others go on.
func TestCallersThatGiveUpHoldNobodyUp(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 1000), 100)
	var all errgroup.Group
	for i, id := range orders {
		all.Go(func() error {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%2 == 0 {
				time.AfterFunc(time.Duration(i)*100*time.Microsecond, cancel)
			}
			_, err := l.Report(ctx, order.Money{Reference: fmt.Sprint("pi_", i), OrderID: id})
			if i%2 == 0 && errors.Is(err, context.Canceled) {
				return nil
			}
			return err
		})
	}
	require.NoError(t, all.Wait())
	for i, id := range orders {
		report(t, l, order.Money{Reference: fmt.Sprint("pi_", i), OrderID: id}, "settled", "")
	}
}
