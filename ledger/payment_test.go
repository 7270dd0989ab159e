package ledger_test

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
)

// newReference makes a reference that no other test has: payments of all sales share them.
func newReference() string { return "pi_" + uuid.NewString() }

// report reports money and checks what became of it.
func report(
	t *testing.T, l *ledger.Ledger, m order.Money, state order.PaymentState, reason order.PaymentReason,
) order.Payment {
	t.Helper()
	p, err := l.Report(t.Context(), m)
	require.NoError(t, err)
	require.Equal(t, [2]any{state, reason}, [2]any{p.State, p.Reason})
	found, err := l.Payment(t.Context(), p.Reference)
	require.NoError(t, err)
	require.Equal(t, p, found)
	return p
}

func TestMoneySettlesOrderOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	orders := testwork.Confirm(t, pool, sale, 2)
	first, second := newReference(), newReference()
	p := report(t, l, order.Money{Reference: first, OrderID: orders[0], Amount: 5, Currency: "EUR"}, "settled", "")
	require.Equal(t, []any{sale, 2, int64(5)}, []any{p.SaleID, p.Version, p.Amount})
	require.Equal(t, first, testwork.Order(t, pool, orders[0]).PaymentReference)
	again := report(t, l, order.Money{Reference: first, OrderID: orders[0]}, "settled", "")
	require.Equal(t, p, again, "a repeat is answered with the first report")
	require.Equal(t, order.StatusConfirmed, testwork.Order(t, pool, orders[1]).Status)
	report(t, l, order.Money{Reference: second, OrderID: orders[0]}, "refund_due", order.RefundAlreadyPaid)
	report(t, l, order.Money{Reference: newReference()}, "refund_due", order.RefundOrderNotFound)

	_, err := l.Refund(t.Context(), first, "re_1", "zoe")
	require.ErrorIs(t, err, order.ErrRefundNotDue)
	_, err = l.Withdraw(t.Context(), orders[0], "a mistake", "zoe")
	require.NoError(t, err)
	report(t, l, order.Money{Reference: first, OrderID: orders[0]}, "refund_due", order.RefundOrderCancelled)
	for range 2 {
		p, err = l.Refund(t.Context(), first, "re_1", "zoe")
		require.NoError(t, err)
		require.Equal(t, []any{order.PaymentRefunded, "re_1", "zoe", 4},
			[]any{p.State, p.RefundReference, p.Operator, p.Version})
	}
	var refunded *order.RefundedError
	_, err = l.Refund(t.Context(), first, "re_2", "zoe")
	require.ErrorAs(t, err, &refunded)
	_, err = l.Refund(t.Context(), newReference(), "re_1", "zoe")
	require.ErrorIs(t, err, order.ErrPaymentNotFound)
}

// Buyers' references are their own: none of them takes that of a payment provider.
func TestBuyersReferencesAreTheirOwn(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	orders := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 2)
	reference := newReference()
	testwork.Pay(t, l, orders[0], "user-1", reference)
	report(t, l, order.Money{Reference: reference, OrderID: orders[1]}, "settled", "")
	p, err := l.Payment(t.Context(), orders[0].String()+":"+reference)
	require.NoError(t, err)
	require.Equal(t, order.PaymentSettled, p.State)
}

// Money counts from when it was reported: an order for which money waits is not expired or cancelled before.
func TestMoneyInTimeComesBeforeWhatHappenedLater(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	testwork.Heartbeat(t, s.Pool)
	l := ledger.New(s.Pool)
	sale := testshop.NewPayableSale(t, s.Pool, 100)
	crowd := testshop.ReservedCrowd(sale, 6)
	for i, e := range crowd {
		report(t, l, order.Money{Reference: fmt.Sprint("pi_", i), OrderID: e.OrderID}, "waiting", "")
	}
	testwork.Record(t, l, crowd)
	// They were reported before the end of the window, a minute ago.
	testwork.WaitLonger(t, s.Pool, 2*time.Minute, "pi_0", "pi_1", "pi_2")
	testwork.EndWindow(t, s.Pool, crowd[0].OrderID, crowd[1].OrderID, crowd[2].OrderID)
	require.Zero(t, testwork.Expire(t, s))
	// A second payment, the buyer's cancellation, a second claim, and an operator: all of them find the money first.
	report(t, l, order.Money{Reference: "second", OrderID: crowd[1].OrderID}, "refund_due", order.RefundAlreadyPaid)
	_, err := l.Cancel(t.Context(), crowd[2].OrderID, crowd[2].UserID)
	require.ErrorIs(t, err, order.ErrIllegalTransition)
	_, err = l.Pay(t.Context(), crowd[3].OrderID, crowd[3].UserID, "claim")
	var paid *order.AlreadyPaidError
	require.ErrorAs(t, err, &paid)
	require.Equal(t, "pi_3", paid.Reference)
	_, err = l.Withdraw(t.Context(), crowd[4].OrderID, "a mistake", "zoe")
	require.NoError(t, err)
	decided, err := l.SweepPayments(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, 2, decided)
	for i, want := range []order.PaymentState{"settled", "settled", "settled", "settled", "refund_due", "settled"} {
		p, err := l.Payment(t.Context(), fmt.Sprint("pi_", i))
		require.NoError(t, err)
		require.Equal(t, want, p.State, i)
	}
	requireNoMoneyLost(t, s.Pool)
}

// The stock of a sale is rebuilt without an order: its money need not wait ten minutes for it.
func TestMoneyOfOrderThatWasLostIsDueSoon(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	lost, other := testshop.NewPayableSale(t, pool, 10), testshop.NewPayableSale(t, pool, 10)
	old := order.NewOrderID(lost)
	binary.BigEndian.PutUint32(old[:], binary.BigEndian.Uint32(old[:])-1) // 65 seconds older
	report(t, l, order.Money{Reference: "lost", OrderID: old}, "waiting", "")
	report(t, l, order.Money{Reference: "other", OrderID: order.NewOrderID(other)}, "waiting", "")
	testshop.Exec(t, pool, `INSERT INTO sale_events (sale_id, revision, type, occurred_at)
		VALUES ($1, 99, 'SaleRebuilt', now() - interval '30 s')`, lost)
	later := order.NewOrderID(lost)
	report(t, l, order.Money{Reference: "later", OrderID: later}, "waiting", "")
	isArriving := true
	sweep := func() {
		_, err := l.SweepPayments(t.Context(), coming(isArriving))
		require.NoError(t, err)
	}
	isArriving = false
	sweep()
	report(t, l, order.Money{Reference: "lost"}, "waiting", "")
	testwork.WaitLonger(t, pool, 20*time.Second, "lost", "other", "later")
	isArriving = true
	sweep()
	report(t, l, order.Money{Reference: "lost"}, "waiting", "")
	isArriving = false
	sweep()
	report(t, l, order.Money{Reference: "lost"}, "refund_due", order.RefundOrderVoided)
	report(t, l, order.Money{Reference: "other"}, "waiting", "")
	report(t, l, order.Money{Reference: "later"}, "waiting", "")
	requireNoMoneyLost(t, pool)
}

// A place in a waiting list, or an entry of a draw, takes no money.
func TestEntriesTakeNoMoney(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	goods, entries := testshop.NewPayableSale(t, pool, 10), testshop.NewPayableSale(t, pool, 10)
	testshop.Exec(t, pool, "INSERT INTO draws (sale_id, entries_id, kind) VALUES ($1, $2, 'waitlist')", goods, entries)
	id := testwork.Confirm(t, pool, entries, 1)[0]
	report(t, l, order.Money{Reference: newReference(), OrderID: id}, "refund_due", order.RefundNothingToPay)
	_, err := l.Pay(t.Context(), id, "user-1", newReference())
	require.ErrorIs(t, err, order.ErrIllegalTransition)
	requireNoMoneyLost(t, pool)
}

// A damaged record of an order keeps no money away: it waits.
func TestMoneyForDamagedOrderIsKept(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	for i, damage := range []string{
		"UPDATE orders SET reserved_at = 'infinity' WHERE id = $1", "UPDATE orders SET version = 3 WHERE id = $1",
	} {
		event := testshop.Reserved(sale, "user-"+uuid.NewString(), int64(i+1))
		testwork.Record(t, l, []order.OrderReserved{event})
		testshop.Exec(t, pool, damage, event.OrderID)
		report(t, l, order.Money{Reference: newReference(), OrderID: event.OrderID}, "waiting", "")
	}
}

// The cancellation of a paid order whose payment is missing would hide the money.
func TestPaidOrderWithoutItsPaymentIsNotCancelled(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	id := testwork.Confirm(t, pool, testshop.NewPayableSale(t, pool, 10), 1)[0]
	report(t, l, order.Money{Reference: newReference(), OrderID: id}, "settled", "")
	testshop.Exec(t, pool, "DELETE FROM payment_events")
	_, err := l.Withdraw(t.Context(), id, "a mistake", "zoe")
	require.ErrorIs(t, err, order.ErrDamaged)
	require.Equal(t, order.StatusPaid, testwork.Order(t, pool, id).Status)
}

// Money may be reported before a worker has recorded the order.
func TestMoneyWaitsForItsOrder(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testshop.NewPayableSale(t, pool, 10)
	event := testshop.Reserved(sale, "ann", 1)
	early, lost := newReference(), newReference()
	report(t, l, order.Money{Reference: early, OrderID: event.OrderID}, "waiting", "")
	report(t, l, order.Money{Reference: lost, OrderID: order.NewOrderID(sale)}, "waiting", "")
	isArriving := true
	sweep := func() {
		_, err := l.SweepPayments(t.Context(), coming(isArriving))
		require.NoError(t, err)
	}
	stateOf := func(reference string) order.PaymentState {
		p, err := l.Payment(t.Context(), reference)
		require.NoError(t, err)
		return p.State
	}
	sweep()
	require.Equal(t, order.PaymentWaiting, stateOf(early))
	testwork.Record(t, l, []order.OrderReserved{event})
	sweep()
	require.Equal(t, order.PaymentSettled, stateOf(early))
	require.Equal(t, order.StatusPaid, testwork.Order(t, pool, event.OrderID).Status)

	isArriving = false
	sweep()
	require.Equal(t, order.PaymentWaiting, stateOf(lost), "before ten minutes are over")
	testwork.WaitLonger(t, pool, 11*time.Minute, lost)
	isArriving = true
	sweep()
	require.Equal(t, order.PaymentWaiting, stateOf(lost), "Redis has it")
	isArriving = false
	sweep()
	require.Equal(t, order.PaymentRefundDue, stateOf(lost))
}

func pacedSale(t *testing.T, pool *pgxpool.Pool, pace int) uuid.UUID {
	t.Helper()
	sale := testshop.NewPayableSale(t, pool, 1000)
	testshop.Exec(t, pool, "UPDATE sales SET payments_per_second = $2 WHERE id = $1", sale, pace)
	return sale
}

// The turns of a sale follow each other at its pace, whichever ledger gives them out.
func TestTurnsToPayFollowThePace(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := pacedSale(t, pool, 10)
	crowd := testshop.ReservedCrowd(sale, 60)
	for i := range 3 {
		l := ledger.New(pool) // a worker that knows nothing of the turns before
		testwork.Record(t, l, crowd[i*20:i*20+20])
		testwork.Record(t, l, crowd[i*20:i*20+20]) // a repeat takes no turn
	}
	var last time.Time
	for i, e := range crowd {
		o := testwork.Order(t, pool, e.OrderID)
		require.WithinDuration(t, o.PayFrom.Add(testshop.PaymentWindow), o.ExpiresAt, time.Second)
		if i > 0 {
			require.Equal(t, 100*time.Millisecond, o.PayFrom.Sub(last))
		}
		last = o.PayFrom
	}
}

// Each state of a payment counts once, however often it is reported, decided about, cancelled and refunded.
func TestPaymentsAreCountedOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	registry := prometheus.NewRegistry()
	noted, err := ledger.CountPayments(registry)
	require.NoError(t, err)
	l := ledger.New(pool).WithPayments(noted)
	sale := testshop.NewPayableSale(t, pool, 10)
	id := testwork.Confirm(t, pool, sale, 1)[0]
	paid, waiting, missing := newReference(), newReference(), order.NewOrderID(sale)
	for range 2 {
		report(t, l, order.Money{Reference: paid, OrderID: id}, "settled", "")
		report(t, l, order.Money{Reference: waiting, OrderID: missing}, "waiting", "")
	}
	testwork.WaitLonger(t, pool, time.Hour, waiting)
	for range 2 {
		_, err := l.SweepPayments(t.Context(), coming(false))
		require.NoError(t, err)
		_, err = l.Withdraw(t.Context(), id, "a mistake", "zoe")
		require.NoError(t, err)
		_, err = l.Refund(t.Context(), paid, "re_1", "zoe")
		require.NoError(t, err)
	}
	_, err = l.Refund(t.Context(), waiting, " ", "zoe")
	require.Error(t, err)
	families, err := registry.Gather()
	require.NoError(t, err)
	counted := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		if n := m.GetCounter().GetValue(); n > 0 {
			counted[m.GetLabel()[1].GetValue()+" "+m.GetLabel()[0].GetValue()] = n
		}
	}
	require.Equal(t, map[string]float64{
		"waiting ": 1, "settled ": 1, "refund_due order-not-found": 1, "refund_due order-cancelled": 1,
		"refunded order-cancelled": 1,
	}, counted)
}

// In its grace an order takes money and does not expire; its buyer sees the deadline. It holds up no other sale.
func TestOrderInItsGraceTakesMoney(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	l := ledger.New(s.Pool)
	patient, strict := testshop.NewPayableSale(t, s.Pool, 10), testshop.NewPayableSale(t, s.Pool, 10)
	require.NoError(t, s.Exec(t, "UPDATE sales SET payment_grace_seconds = 120 WHERE id = $1", patient))
	inGrace, others := testwork.Confirm(t, s.Pool, patient, 2), testwork.Confirm(t, s.Pool, strict, 1)
	testwork.EndWindow(t, s.Pool, append(others, inGrace...)...) // a minute ago
	require.Negative(t, time.Until(testwork.Order(t, s.Pool, inGrace[0]).ExpiresAt))
	require.Equal(t, 1, testwork.Expire(t, s))
	require.Equal(t, order.StatusExpired, testwork.Order(t, s.Pool, others[0]).Status)
	report(t, l, order.Money{Reference: newReference(), OrderID: inGrace[0]}, "settled", "")
	report(t, l, order.Money{Reference: newReference(), OrderID: others[0]}, "refund_due", order.RefundOrderExpired)

	require.NoError(t, testwork.MoveDue(t.Context(), s.Pool, "pay_clock() - interval '3 min'", inGrace[1]))
	report(t, l, order.Money{Reference: newReference(), OrderID: inGrace[1]}, "refund_due", order.RefundOrderExpired)
	require.Equal(t, 1, testwork.Expire(t, s))
	require.Equal(t, order.StatusExpired, testwork.Order(t, s.Pool, inGrace[1]).Status)
}

// Two workers that record orders of one sale at once share its pace.
func TestWorkersShareThePace(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	sale := pacedSale(t, pool, 10)
	crowd := testshop.ReservedCrowd(sale, 60)
	var workers errgroup.Group
	for i := range 6 {
		workers.Go(func() error {
			_, err := ledger.New(pool).Record(t.Context(), crowd[i*10:i*10+10])
			return err
		})
	}
	require.NoError(t, workers.Wait())
	const gaps = `SELECT count(*) FROM (SELECT pay_from - lag(pay_from) OVER (ORDER BY pay_from) AS gap FROM orders) AS g
		WHERE gap = interval '100 ms'`
	require.EqualValues(t, 59, testshop.QueryInt(t, pool, gaps))
}
