package ledger_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
)

// recordWith records a batch as a worker does, halved where an order is at fault.
func recordWith(t testing.TB, l *ledger.Ledger, events ...order.OrderReserved) []ledger.Outcome {
	t.Helper()
	return ledger.RecordWith(t.Context(), l, func(ctx context.Context, try ledger.Transaction) ([]ledger.Outcome, error) {
		return try(ctx)
	}, events)
}

func TestBasketIsRecordedWithItsLines(t *testing.T) {
	t.Parallel()
	pool, trips := testshop.CountTrips(t, testkit.Pool(t))
	l := ledger.New(pool)
	sale, plain := testwork.NewSaleWithItems(t, pool, 10, 10, 10), testshop.NewSale(t, pool, 10)
	// Without heartbeats the clock of deadlines stands still.
	testshop.Exec(t, pool, "UPDATE pulse SET seen_at = now() - interval '1 hour'")
	basket := testwork.Basket(sale, "ann", 2, "a2c1")
	events := []order.OrderReserved{
		testshop.Reserved(plain, "ann", 1), basket, testshop.Reserved(plain, "bob", 2),
		testwork.Basket(sale, "bob", 3, "c1"),
	}
	earlier := trips.N.Load()
	outcomes := testwork.Record(t, l, events)
	require.EqualValues(t, 1, trips.N.Load()-earlier, "round trips for new events")
	for i, out := range outcomes {
		require.Equal(t, ledger.Outcome{Event: events[i], Status: order.StatusConfirmed, Fresh: true}, out)
	}
	require.Equal(t, "2,0,2 4", testwork.SoldItems(t, pool, sale))
	require.EqualValues(t, 2, testshop.Sold(t, pool, plain))
	o := testwork.Order(t, pool, basket.OrderID)
	require.Equal(t, []any{order.Lines("a2c1"), order.Items(`{"item-a":2,"item-c":1}`), int64(3), int64(5000), "EUR"},
		[]any{o.Lines, o.Items, o.Quantity, o.Amount, o.Currency})
	one := testwork.Order(t, pool, events[0].OrderID)
	require.Equal(t, []any{order.Lines(""), order.Items("")}, []any{one.Lines, one.Items})

	// The second path, which a repeat takes, writes the same rows.
	again := testwork.Basket(sale, "cid", 4, "a2c1")
	for i, out := range testwork.Record(t, l, []order.OrderReserved{basket, again}) {
		require.NoError(t, out.Err)
		require.Equal(t, i == 1, out.Fresh)
	}
	require.JSONEq(t, written(t, pool, basket), written(t, pool, again))
	require.Contains(t, written(t, pool, basket), `"lines": "a2c1"`)
	require.Equal(t, "4,0,3 7", testwork.SoldItems(t, pool, sale))

	// The same units of other items are another order.
	basket.Lines = "b3"
	for _, batch := range [][]order.OrderReserved{{basket}, {testwork.Basket(sale, "dan", 5, "b1"), basket}} {
		outcomes := testwork.Record(t, l, batch)
		require.ErrorIs(t, outcomes[len(batch)-1].Err, ledger.ErrContradiction)
	}
	twin := testwork.Basket(sale, "eve", 6, "a1")
	other := twin
	other.Lines = "b1"
	require.ErrorIs(t, testwork.Record(t, l, []order.OrderReserved{twin, other})[1].Err, ledger.ErrContradiction)
	require.Equal(t, "5,1,3 9", testwork.SoldItems(t, pool, sale))
}

// An order is dead-lettered if its lines are not of the items of its sale, and the others of its batch are recorded.
func TestOrderWithWrongItemsIsBadData(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale, plain := testwork.NewSaleWithItems(t, pool, 10, 10), testshop.NewSale(t, pool, 10)
	for _, wrong := range []order.OrderReserved{
		testwork.Basket(sale, "ann", 1, "c1"), testwork.Basket(sale, "ann", 1, "a1B1"),
		testshop.Reserved(sale, "ann", 1), testwork.Basket(plain, "ann", 1, "a1"),
	} {
		for _, out := range recordWith(t, l, wrong, testwork.Basket(sale, uuid.NewString(), 2, "b1")) {
			if out.Event.OrderID == wrong.OrderID {
				require.ErrorIs(t, out.Err, ledger.ErrWrongItems)
				require.Equal(t, ledger.BadData, ledger.FaultOf(out.Err))
			} else {
				require.Equal(t, order.StatusConfirmed, out.Status)
			}
		}
		require.Empty(t, testshop.History(t, pool, wrong.OrderID))
	}
	require.Equal(t, "0,4 4", testwork.SoldItems(t, pool, sale))
	require.Zero(t, testshop.Sold(t, pool, plain))

	// An operator discards it. Another delivery changes nothing, whatever its items.
	lost := testshop.Reserved(sale, "ann", 1)
	outcomes, err := l.Refuse(t.Context(), []order.OrderReserved{lost}, "discarded")
	require.NoError(t, err)
	require.Equal(t,
		ledger.Outcome{Event: lost, Status: order.StatusRejected, Reason: "discarded", Fresh: true}, outcomes[0])
	again := recordWith(t, l, lost, testwork.Basket(sale, "bob", 2, "b1"))
	require.Equal(t, ledger.Outcome{Event: lost, Status: order.StatusRejected, Reason: "discarded"}, again[0])
	require.Equal(t, order.StatusConfirmed, again[1].Status)
	lost.Quantity = 2
	require.ErrorIs(t, recordWith(t, l, lost)[0].Err, ledger.ErrContradiction)
	require.Equal(t, "0,5 5", testwork.SoldItems(t, pool, sale))
}

// The order that an item does not hold is rejected, and the others of its batch are recorded.
func TestSoldOutItemRejectsItsOrdersOnly(t *testing.T) {
	t.Parallel()
	pool, trips := testshop.CountTrips(t, testkit.Pool(t))
	l := ledger.New(pool)
	sale := testwork.NewSaleWithItems(t, pool, 3, 100)
	var events []order.OrderReserved
	for i := range 60 {
		lines := []order.Lines{"a1b1", "b1", "a2"}[i%3]
		events = append(events, testwork.Basket(sale, fmt.Sprint("user-", i), int64(i), lines))
	}
	earlier := trips.N.Load()
	confirmed := map[order.Lines]int{}
	for _, out := range recordWith(t, l, events...) {
		require.NoError(t, out.Err)
		switch out.Status {
		case order.StatusConfirmed:
			confirmed[out.Event.Lines]++
		default:
			require.Equal(t, order.RejectedSoldOut, out.Reason)
			require.NotEqual(t, order.Lines("b1"), out.Event.Lines)
		}
	}
	require.Equal(t, map[order.Lines]int{"a1b1": 1, "b1": 20, "a2": 1}, confirmed)
	require.Equal(t, "3,21 24", testwork.SoldItems(t, pool, sale))
	require.Less(t, trips.N.Load()-earlier, int64(40), "round trips: orders of a sold-out item are not halved again")
}

// The units of an order that ends return to each of its items.
func TestEndedBasketReturnsUnitsOfEachItem(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testwork.NewSaleWithItems(t, pool, 10, 10)
	var ids []uuid.UUID
	for i, lines := range []order.Lines{"a1b3", "a2b1", "b2", "a1", "a1"} {
		event := testwork.Basket(sale, fmt.Sprint("user-", i), int64(i), lines)
		testwork.Record(t, l, []order.OrderReserved{event})
		ids = append(ids, event.OrderID)
	}
	require.Equal(t, "5,6 11", testwork.SoldItems(t, pool, sale))
	testwork.Cancel(t, l, ids[0], "user-0")
	require.Equal(t, "4,3 7", testwork.SoldItems(t, pool, sale))
	testwork.Pay(t, l, ids[1], "user-1", "pi_1")
	require.Equal(t, "4,3 7", testwork.SoldItems(t, pool, sale))
	withdrawn, err := l.Withdraw(t.Context(), ids[1], "a mistake", "zoe")
	require.NoError(t, err)
	require.Equal(t, order.Items(`{"item-a":2,"item-b":1}`), withdrawn.Items)
	require.Equal(t, "2,2 4", testwork.SoldItems(t, pool, sale))
	testwork.EndWindow(t, pool, ids[2], ids[3])
	done, err := ledger.SweepSales(t.Context(), ledger.NewExpirer(l, testkit.Logger(t)).ExpireSome)
	require.NoError(t, err)
	require.Equal(t, 2, done)
	require.Equal(t, "1,0 1", testwork.SoldItems(t, pool, sale))
	require.Equal(t, []string{"2 a2b1", "3 a2b1", "4 a2b1"}, testshop.Rows(t, pool,
		"SELECT version || ' ' || lines FROM order_events WHERE order_id = $1 ORDER BY version", ids[1]))
	require.EqualValues(t, 4, testshop.QueryInt(t, pool, testshop.PendingReleases))
}

// A basket is paid at the sum over its lines.
func TestBasketIsPaidAtItsSum(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	l := ledger.New(pool)
	sale := testwork.NewSaleWithItems(t, pool, 10, 10)
	first, second := testwork.Basket(sale, "ann", 1, "a1b2"), testwork.Basket(sale, "bob", 2, "a2b1")
	testwork.Record(t, l, []order.OrderReserved{first, second})
	report(t, l, order.Money{Reference: newReference(), OrderID: first.OrderID, Amount: 3000, Currency: "EUR"},
		"refund_due", order.RefundAmountMismatch)
	report(t, l, order.Money{Reference: newReference(), OrderID: first.OrderID, Amount: 5000, Currency: "EUR"},
		"settled", "")
	testwork.Pay(t, l, second.OrderID, "bob", "pi_1")
	require.EqualValues(t, 4000, testshop.QueryInt(t, pool,
		"SELECT amount FROM payments WHERE order_id = $1", second.OrderID))
	require.Equal(t, order.StatusPaid, testwork.Order(t, pool, first.OrderID).Status)
}

// Each way to read an order shows its items and what it costs.
func TestEveryListShowsItems(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale, user := testwork.NewSaleWithItems(t, pool, 10, 10), "user-"+uuid.NewString()
	event := testwork.Basket(sale, user, 1, "a1b2")
	testwork.Record(t, l, []order.OrderReserved{event})
	want, _, err := l.History(t.Context(), event.OrderID)
	require.NoError(t, err)
	require.Equal(t, []any{order.Lines("a1b2"), order.Items(`{"item-a":1,"item-b":2}`), int64(5000)},
		[]any{want.Lines, want.Items, want.Amount})
	for _, filter := range []order.Filter{{User: user}, {Sale: sale}, {User: user, Sale: sale}} {
		found, _, err := l.ListOrders(t.Context(), filter, uuid.Nil, 10)
		require.NoError(t, err)
		require.Equal(t, []order.Placed{want}, found)
	}
	found, _, err := l.ListByPrefix(t.Context(), order.Filter{User: user}, order.Order{}, 10)
	require.NoError(t, err)
	require.Equal(t, []order.Placed{want}, found)
	newest := testshop.QueryInt(t, pool, "SELECT max(position) FROM order_events")
	for _, span := range []ledger.Span{{}, {ChangedTo: newest}} {
		found = nil
		err = l.Export(t.Context(), order.Filter{Sale: sale}, span, func(o order.Placed) error {
			found = append(found, o)
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, []order.Placed{want}, found)
	}
	cancelled, err := l.Cancel(t.Context(), event.OrderID, user)
	require.NoError(t, err)
	require.Equal(t, want.Items, cancelled.Items)

	lost := testwork.Basket(sale, "bob", 2, "b2")
	testshop.RaiseEpoch(t, pool, sale)
	receipt := receiptFor(lost)
	receipt.Lines = lost.Lines
	voided, err := l.FindByReceipt(t.Context(), receipt)
	require.NoError(t, err)
	require.Equal(t, []any{order.StatusVoided, order.Lines("b2"), order.Items(`{"item-b":2}`)},
		[]any{voided.Status, voided.Lines, voided.Items})
}

// A sale that has left Redis answers with the lines of its orders.
func TestPastAnswerHasItems(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale := testwork.NewSaleWithItems(t, pool, 10, 10)
	request := reservation.Request{
		Sale: sale, User: "ann", IdempotencyKey: "key", Items: map[string]int64{"item-a": 1, "item-b": 2},
	}
	event := testwork.Basket(sale, "ann", 1, "a1b2")
	event.KeyFingerprint = request.KeyFingerprint()
	testwork.Record(t, l, []order.OrderReserved{event})
	ask := func(r reservation.Request, want reservation.Verdict) {
		t.Helper()
		answer, err := l.PastAnswer(t.Context(), r)
		require.NoError(t, err)
		require.Equal(t, want, answer.Verdict)
		if want != reservation.KeyReused {
			require.Equal(t, []any{event.Lines, order.Items(`{"item-a":1,"item-b":2}`)},
				[]any{answer.Reservation.Lines, answer.Of.Units})
		}
	}
	ask(request, reservation.Replayed)
	other := request
	other.IdempotencyKey = ""
	ask(other, reservation.AlreadyPurchased)
	other = request
	other.Items = map[string]int64{"item-a": 2, "item-b": 1}
	ask(other, reservation.KeyReused)
	other.Items, other.Quantity = nil, 3
	ask(other, reservation.KeyReused)
	testwork.Cancel(t, l, event.OrderID, "ann")
	ask(request, reservation.OrderEnded)
}

// Workers record and cancel orders of several sales with overlapping items in opposite orders. They wait for each
// other, none may run into a deadlock, and no unit is lost.
func TestConcurrentBasketsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	const workers, rounds, size = 4, 15, 20
	sales := []uuid.UUID{
		testwork.NewSaleWithItems(t, pool, 1_000_000, 1_000_000, 1_000_000), testshop.NewPayableSale(t, pool, 1_000_000),
		testwork.NewSaleWithItems(t, pool, 1_000_000, 1_000_000, 1_000_000),
	}
	var all errgroup.Group
	for w := range workers {
		all.Go(func() error {
			for round := range rounds {
				var events []order.OrderReserved
				for i := range size {
					user, lines := fmt.Sprint("user-", w, "-", round, "-", i), []order.Lines{"a1b1", "b1c1", "a1c1"}[rand.IntN(3)]
					event := testwork.Basket(sales[i%len(sales)], user, int64(i), lines)
					if i%len(sales) == 1 {
						event = testshop.Reserved(sales[1], user, int64(i))
					}
					events = append(events, event)
				}
				if w%2 == 1 {
					slices.Reverse(events)
				}
				if _, err := ledger.New(pool).Record(context.Background(), events); err != nil {
					return err
				}
				for _, e := range events[:size/2] {
					if _, err := ledger.New(pool).Cancel(context.Background(), e.OrderID, e.UserID); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
	require.Zero(t, testshop.QueryInt(t, pool, `SELECT count(*) FROM sale_items AS i WHERE sold <> (
		SELECT coalesce(sum(units), 0) FROM orders AS o, order_lines(o.lines) AS l
		WHERE o.sale_id = i.sale_id AND o.status = 'confirmed' AND l.item = i.item)`))
	require.Zero(t, testshop.QueryInt(t, pool, `SELECT count(*) FROM sales AS s WHERE items > 0 AND sold <> (
		SELECT sum(sold) FROM sale_items WHERE sale_id = s.id)`))
}

// Two workers record orders of the same items at once: for each item they confirm what its stock holds.
func TestConcurrentBasketsNeverExceedStockOfItem(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	sale := testwork.NewSaleWithItems(t, pool, 20, 30)
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			for i := range 40 {
				lines := []order.Lines{"a1b1", "b1"}[i%2]
				_, err := ledger.New(pool).Record(context.Background(),
					[]order.OrderReserved{testwork.Basket(sale, fmt.Sprint(w, "-", i), int64(i), lines)})
				if err != nil && ledger.FaultOf(err) != ledger.Oversold {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	sold := testwork.SoldItems(t, pool, sale)
	var a, b, all int64
	_, err := fmt.Fscanf(bytes.NewBufferString(sold), "%d,%d %d", &a, &b, &all)
	require.NoError(t, err)
	require.Equal(t, []int64{30, a + b}, []int64{b, all}, "the second item is sold out")
	require.LessOrEqual(t, a, int64(20))
	require.Equal(t, a, testshop.QueryInt(t, pool, "SELECT count(*) FROM orders WHERE lines = 'a1b1'"))
}
