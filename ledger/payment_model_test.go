package ledger_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation/order"
	"stampede/sql"
)

// world is an order and what was reported for it: the state of the model. Its zero value is an order that is not
// recorded.
type world struct {
	status            order.Status
	overdue, archived bool
	// money are the payments a and b of the shop, and what the buyer claims with the reference of a. bFirst says that b
	// was reported before a.
	money  [3]fate
	bFirst bool
	// paidBy is the index of the payment that settled the order.
	paidBy int
	// other is true if a was reported with another amount, too, and open if that names the sale. homeless is true if a has
	// no sale: it went back before there was an order.
	other, open, homeless bool
}

// claim is the index of what the buyer claims.
const claim = 2

type fate struct {
	state  order.PaymentState
	reason order.PaymentReason
}

func due(why order.PaymentReason) fate { return fate{order.PaymentRefundDue, why} }

// isThere is true if Postgres has the order.
func (w *world) isThere() bool { return w.status != "" && !w.archived }

// refusal is why the order takes no money; empty if it does. Money that waited is in time.
func (w *world) refusal(overdue bool) order.PaymentReason {
	switch {
	case w.status == order.StatusPaid:
		return order.RefundAlreadyPaid
	case w.status == order.StatusCancelled:
		return order.RefundOrderCancelled
	case w.status == order.StatusVoided:
		return order.RefundOrderVoided
	case w.status == order.StatusExpired || overdue:
		return order.RefundOrderExpired
	}
	return ""
}

// decide applies the rule to a payment.
func (w *world) decide(i int, overdue bool) {
	claimed := w.money[claim]
	switch {
	case !w.isThere():
		w.money[i] = fate{state: order.PaymentWaiting}
		return
	case i == 0 && claimed.state != "" && claimed.state != order.PaymentClaimed: // it is the same money
		if w.money[0], w.money[claim] = claimed, (fate{state: order.PaymentClaimed}); w.paidBy == claim {
			w.paidBy = 0
		}
		return
	}
	if why := w.refusal(overdue); why != "" {
		w.money[i] = due(why)
		return
	}
	w.money[i], w.status, w.paidBy = fate{state: order.PaymentSettled}, order.StatusPaid, i
}

// decideWaiting decides about the money that waits, as whoever locks the order does.
func (w *world) decideWaiting() {
	if !w.isThere() {
		return
	}
	for _, i := range map[bool][]int{false: {0, 1}, true: {1, 0}}[w.bFirst] {
		if w.money[i].state == order.PaymentWaiting {
			w.decide(i, false)
		}
	}
}

func (w *world) report(i int) {
	w.decideWaiting()
	if w.money[i] == (fate{}) {
		w.bFirst = i == 1 && w.money[0] == (fate{}) || w.bFirst
		w.decide(i, w.overdue)
	}
}

// contradict reports a with another amount.
func (w *world) contradict() {
	if w.money[0] == (fate{}) {
		return // it would be the first report
	}
	w.decideWaiting()
	if !w.other {
		w.other, w.open = true, w.isThere()
	}
}

// pay is what the buyer says of a.
func (w *world) pay() {
	w.decideWaiting()
	if !w.isThere() || w.status == order.StatusPaid && w.paidBy != 1 || w.money[0] != (fate{}) {
		return
	}
	switch why := w.refusal(w.overdue); {
	case why == "":
		w.money[claim], w.status, w.paidBy = fate{state: order.PaymentSettled}, order.StatusPaid, claim
	case w.money[claim] == (fate{}):
		w.money[claim] = fate{order.PaymentClaimed, why}
	}
}

// giveBack is a refund of a at the provider.
func (w *world) giveBack() {
	if c := w.money[claim].state; w.money[0] == (fate{}) && c != "" && c != order.PaymentClaimed {
		w.report(0)
	}
	switch w.money[0].state {
	case "":
		w.bFirst = false
		w.homeless = !w.isThere()
		w.money[0] = fate{order.PaymentRefunded, order.RefundedOutside}
	case order.PaymentWaiting:
		w.homeless = true
		w.money[0] = fate{order.PaymentRefunded, order.RefundedOutside}
	case order.PaymentSettled:
		w.money[0] = fate{order.PaymentRefunded, order.RefundedOutside}
	case order.PaymentRefundDue:
		w.money[0].state = order.PaymentRefunded
	}
}

// sweep decides about waiting payments, also about those whose order never came if it is lost.
func (w *world) sweep(isLost bool) {
	w.decideWaiting()
	for i, m := range w.money {
		if isLost && m.state == order.PaymentWaiting {
			w.money[i] = due(order.RefundOrderNotFound)
		}
	}
}

// mayLeave is the part of sale_in_use that these steps change.
func (w *world) mayLeave() bool {
	for _, m := range w.money {
		if m.state == order.PaymentRefundDue && m.reason != order.RefundOrderNotFound {
			return false
		}
	}
	return w.isThere() && w.status != order.StatusConfirmed && !w.open
}

// played is one order in Postgres.
type played struct {
	pool  *pgxpool.Pool
	l     *ledger.Ledger
	event order.OrderReserved
}

func (p played) money(i int) order.Money {
	reference := fmt.Sprint(p.event.OrderID, "-", i)
	return order.Money{Reference: reference, OrderID: p.event.OrderID, Amount: 5, Currency: "EUR"}
}

// reference is that of a payment; claim is that of the claim.
func (p played) reference(i int) string {
	if m := p.money(0); i == claim {
		return m.KeyOfClaim()
	}
	return p.money(i).Reference
}

// otherReference is that of what contradicts a.
func (p played) otherReference() string {
	m := p.money(0)
	m.Amount = 6
	return m.KeyOfContradiction()
}

func (p played) report(ctx context.Context, i int) error {
	_, err := p.l.Report(ctx, p.money(i))
	return err
}

// coming says of each order whether it may still come.
func coming(areComing bool) ledger.MayArrive {
	return func(context.Context, uuid.UUID, time.Duration) (bool, error) { return areComing, nil }
}

func (p played) sweep(ctx context.Context, isArriving bool) error {
	_, err := p.l.SweepPayments(ctx, coming(isArriving))
	return err
}

// step is an event in the model, and in Postgres. Calls that are refused change nothing.
type step struct {
	name  string
	model func(*world)
	play  func(context.Context, played) error
}

func quietly(_ any, _ error) error { return nil }

var (
	record = step{"record", func(w *world) {
		if w.status == "" {
			w.status = order.StatusConfirmed
		}
	}, func(ctx context.Context, p played) error {
		return quietly(p.l.Record(ctx, []order.OrderReserved{p.event}))
	}}
	void = step{"void", func(w *world) {
		if w.status == "" {
			w.status = order.StatusVoided
		}
	}, func(ctx context.Context, p played) error {
		p.event.Epoch = 0
		return quietly(p.l.Record(ctx, []order.OrderReserved{p.event}))
	}}
	reportA = step{
		"report a", func(w *world) { w.report(0) },
		func(ctx context.Context, p played) error { return p.report(ctx, 0) },
	}
	reportB = step{
		"report b", func(w *world) { w.report(1) },
		func(ctx context.Context, p played) error { return p.report(ctx, 1) },
	}
	contradict = step{"contradict a", (*world).contradict, func(ctx context.Context, p played) error {
		if _, err := p.l.Payment(ctx, p.reference(0)); err != nil {
			return nil //nolint:nilerr // as in the model
		}
		m := p.money(0)
		m.Amount = 6
		return quietly(p.l.Report(ctx, m))
	}}
	pay = step{"pay a", (*world).pay, func(ctx context.Context, p played) error {
		return quietly(p.l.Pay(ctx, p.event.OrderID, p.event.UserID, p.reference(0)))
	}}
	giveBack = step{"give a back", (*world).giveBack, func(ctx context.Context, p played) error {
		return quietly(p.l.RefundedAtProvider(ctx,
			order.ProviderRefund{Money: p.money(0), RefundReference: "re_1", Refunded: 5, By: "bank"}))
	}}
	late = step{"late", func(w *world) {
		w.overdue = w.overdue || w.status == order.StatusConfirmed
	}, func(ctx context.Context, p played) error {
		for _, statement := range []string{ // what waits was reported before
			"UPDATE payment_events SET occurred_at = occurred_at - interval '2 minutes' WHERE order_id = $1 AND type = 'PaymentReceived'",
			"UPDATE open_payments SET since = since - interval '2 minutes' WHERE order_id = $1 AND state = 'waiting'",
		} {
			if _, err := p.pool.Exec(ctx, statement, p.event.OrderID); err != nil {
				return err
			}
		}
		_ = testwork.MoveDue(ctx, p.pool, "pay_clock() - interval '1 min'", p.event.OrderID) // if there is an order
		return quietly(ledger.Heartbeat{Pool: p.pool, Logger: slog.New(slog.DiscardHandler)}.Send(ctx))
	}}
	expire = step{"expire", func(w *world) {
		waits := w.money[0].state == order.PaymentWaiting || w.money[1].state == order.PaymentWaiting
		if w.overdue && w.status == order.StatusConfirmed && !w.archived && !waits {
			w.status = order.StatusExpired
		}
	}, func(ctx context.Context, p played) error {
		return quietly(ledger.SweepSales(ctx, ledger.NewExpirer(p.l, slog.New(slog.DiscardHandler)).ExpireSome))
	}}
	cancel = step{"cancel", func(w *world) {
		w.decideWaiting()
		if w.status == order.StatusConfirmed && !w.overdue {
			w.status = order.StatusCancelled
		}
	}, func(ctx context.Context, p played) error {
		return quietly(p.l.Cancel(ctx, p.event.OrderID, p.event.UserID))
	}}
	withdraw = step{"withdraw", func(w *world) {
		w.decideWaiting()
		if w.status == order.StatusPaid && !w.archived && w.money[w.paidBy].state == order.PaymentSettled {
			w.money[w.paidBy] = due(order.RefundOrderCancelled)
		}
		if w.status.Live() && !w.archived {
			w.status = order.StatusCancelled
		}
	}, func(ctx context.Context, p played) error {
		return quietly(p.l.Withdraw(ctx, p.event.OrderID, "a test", "zoe"))
	}}
	sweep = step{
		"sweep", func(w *world) { w.sweep(false) },
		func(ctx context.Context, p played) error { return p.sweep(ctx, true) },
	}
	lose = step{"lose", func(w *world) { w.sweep(true) }, func(ctx context.Context, p played) error {
		_, err := p.pool.Exec(ctx, "UPDATE open_payments SET since = since - interval '11 minutes' WHERE order_id = $1",
			p.event.OrderID)
		if err != nil {
			return err
		}
		return p.sweep(ctx, false)
	}}
	refund = step{"refund a", func(w *world) {
		if w.money[0].state == order.PaymentRefundDue {
			w.money[0].state = order.PaymentRefunded
		}
	}, func(ctx context.Context, p played) error {
		return quietly(p.l.Refund(ctx, p.reference(0), "re", "zoe"))
	}}
	archived = step{"archive", func(w *world) {
		if !w.mayLeave() {
			return
		}
		w.archived = true
		for i, m := range w.money { // what is of the sale is in the file
			if m.state != order.PaymentWaiting && m.reason != order.RefundOrderNotFound && !(i == 0 && w.homeless) {
				w.money[i] = fate{}
			}
		}
		w.bFirst = w.bFirst && w.money[1] != (fate{})
	}, func(ctx context.Context, p played) error { return p.archive(ctx) }}
)

// archive is what package archive does to a sale that nothing needs.
func (p played) archive(ctx context.Context) error {
	tag, err := p.pool.Exec(ctx, `UPDATE sales SET archived_at = now(), archive = '{}', retired_at = now() WHERE id = $1
		AND archived_at IS NULL AND EXISTS (SELECT FROM orders WHERE sale_id = $1 AND status <> 'confirmed')
		AND NOT EXISTS (SELECT FROM payments WHERE sale_id = $1 AND state IN ('waiting', 'refund_due', 'unclear'))`, p.event.SaleID)
	if err != nil || tag.RowsAffected() == 0 {
		return err
	}
	if err := p.pool.QueryRow(ctx, sql.ArchiveDeleteSome, p.event.SaleID, uuid.Nil, 10).Scan(new(uuid.UUID)); err != nil {
		return err
	}
	_, err = p.pool.Exec(ctx, sql.ArchiveDeleteRest, p.event.SaleID)
	return err
}

var steps = []step{
	record, void, reportA, reportB, contradict, pay, giveBack, late, expire, cancel, withdraw, sweep, lose, refund,
	archived,
}

// stepsFrom returns the steps that are tried in a state. What is told of one payment in several ways is not tried
// beside another payment: all of it together takes minutes.
func stepsFrom(w world) []step {
	return slices.DeleteFunc(slices.Clone(steps), func(s step) bool {
		switch s.name {
		case contradict.name, giveBack.name:
			return w.money[1] != (fate{})
		case reportB.name:
			return w.other || w.money[claim] != (fate{}) || w.money[0].reason == order.RefundedOutside
		}
		return false
	})
}

// found reads the world from Postgres, as far as it shows there.
func (p played) found(t *testing.T, want world) (w world) {
	t.Helper()
	w = want // paidBy and the like
	if !want.archived {
		w.status = ""
		if o, err := p.l.Order(t.Context(), p.event.OrderID); err == nil {
			w.status = o.Status
		}
	}
	for i := range w.money {
		w.money[i] = fate{}
		if m, err := p.l.Payment(t.Context(), p.reference(i)); err == nil {
			w.money[i] = fate{m.State, m.Reason}
		}
	}
	_, err := p.l.Payment(t.Context(), p.otherReference())
	w.other = err == nil
	return w
}

func play(t *testing.T, pool *pgxpool.Pool, path []step) (played, world) {
	t.Helper()
	p := played{pool, ledger.New(pool), testshop.Reserved(testshop.NewPayableSale(t, pool, 10), "ann", 1)}
	var w world
	for _, s := range path {
		require.NoError(t, s.play(t.Context(), p), names(path))
		s.model(&w)
	}
	return p, w
}

func names(path []step) (all []string) {
	for _, s := range path {
		all = append(all, s.name)
	}
	return all
}

// reachable returns a shortest path to each state of the model.
func reachable() (paths [][]step, states []world) {
	known := map[world]bool{{}: true}
	paths, states = [][]step{nil}, []world{{}}
	for i := 0; i < len(paths); i++ {
		for _, s := range stepsFrom(states[i]) {
			next := states[i]
			if s.model(&next); !known[next] {
				known[next] = true
				paths = append(paths, append(paths[i][:len(paths[i]):len(paths[i])], s))
				states = append(states, next)
			}
		}
	}
	return paths, states
}

// requireNoMoneyLost makes the audit's check S8 of everything in Postgres.
func requireNoMoneyLost(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "CREATE TEMP TABLE audit_sales ON COMMIT DROP AS SELECT id AS sale_id "+
			"FROM sales WHERE archived_at IS NULL; CREATE TEMP TABLE audit_waiting (order_id uuid, parked boolean) ON COMMIT DROP;"+
			strings.ReplaceAll(sql.AuditPayments, "{{steps}}", "'"+strings.Join(order.PaymentSteps(), "', '")+"'"))
		require.NoError(t, err)
		rows, _ := tx.Query(t.Context(), "SELECT what FROM ("+sql.AuditMoney+") AS f") // its error comes with the rows
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Empty(t, found)
		_, err = tx.Exec(t.Context(), "DROP TABLE audit_payments")
		return err
	}))
}

// untried returns a step that was not tried in this state of the model, preferably one that changes nothing.
func untried(tried map[string]bool, w world) (untried *step) {
	for _, s := range stepsFrom(w) {
		if tried[fmt.Sprint(w, s.name)] {
			continue
		}
		next := w
		if s.model(&next); untried == nil || next == w {
			untried = &s
		}
		if next == w {
			break
		}
	}
	if untried != nil {
		tried[fmt.Sprint(w, untried.name)] = true
	}
	return untried
}

// From each state that an order and its money can reach, each step leads where the rule says, and no money is lost.
func TestMoneyFollowsModel(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	paths, states := reachable()
	require.Greater(t, len(states), 300)
	tried := map[string]bool{}
	for i := range paths {
		for next := untried(tried, states[i]); next != nil; next = untried(tried, states[i]) {
			path := paths[i]
			p, w := play(t, pool, path)
			for ; next != nil; next = untried(tried, w) { // and on from where it leads
				path = append(path[:len(path):len(path)], *next)
				require.NoError(t, next.play(t.Context(), p), names(path))
				next.model(&w)
				require.Equal(t, w, p.found(t, w), "%v", names(path))
			}
			testshop.Exec(t, pool, "UPDATE orders SET due = NULL WHERE status = 'confirmed'") // nothing of it expires later
		}
	}
	steps := 0
	for _, w := range states {
		steps += len(stepsFrom(w))
	}
	require.Len(t, tried, steps)
	requireNoMoneyLost(t, pool)
}

// Two steps at once lead where one of their orders leads.
func TestConcurrentMoneyFollowsModel(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	atOnce := []step{record, reportA, reportB, pay, giveBack, expire, cancel, withdraw, sweep, refund}
	paths, _ := reachable()
	for _, path := range paths {
		if len(path) > 2 {
			continue
		}
		for i, x := range atOnce {
			for _, y := range atOnce[i:] {
				p, before := play(t, pool, path)
				if before.archived {
					continue
				}
				var both sync.WaitGroup
				for _, s := range []step{x, y} {
					both.Go(func() { assert.NoError(t, s.play(t.Context(), p)) })
				}
				both.Wait()
				for _, again := range []step{expire, sweep} { // they skip an order that the other has locked, and come again
					if x.name == again.name || y.name == again.name {
						require.NoError(t, again.play(t.Context(), p))
					}
				}
				first, second := before, before
				x.model(&first)
				y.model(&first)
				y.model(&second)
				x.model(&second)
				if found := p.found(t, first); found != first {
					require.Equal(t, second, p.found(t, second), "%v, then %s and %s", names(path), x.name, y.name)
				}
			}
		}
		testshop.Exec(t, pool, "UPDATE orders SET due = NULL WHERE status = 'confirmed'")
	}
	requireNoMoneyLost(t, pool)
}
