package ledger_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

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
	// money are the payments a and b; bFirst says which one was reported first.
	money  [2]fate
	bFirst bool
	// paidBy is the index of the payment that settled the order.
	paidBy int
}

type fate struct {
	state  order.PaymentState
	reason order.RefundReason
}

func due(why order.RefundReason) fate { return fate{order.PaymentRefundDue, why} }

// decide applies the rule to a payment.
func (w *world) decide(i int) {
	switch {
	case w.status == "" || w.archived:
		w.money[i] = fate{state: order.PaymentWaiting}
	case w.status == order.StatusPaid:
		w.money[i] = due(order.RefundAlreadyPaid)
	case w.status == order.StatusCancelled:
		w.money[i] = due(order.RefundOrderCancelled)
	case w.status == order.StatusVoided:
		w.money[i] = due(order.RefundOrderVoided)
	case w.status == order.StatusExpired || w.overdue:
		w.money[i] = due(order.RefundOrderExpired)
	default:
		w.money[i], w.status, w.paidBy = fate{state: order.PaymentSettled}, order.StatusPaid, i
	}
}

func (w *world) report(i int) {
	if w.money[i] == (fate{}) {
		w.bFirst = i == 1 && w.money[0] == (fate{}) || w.bFirst
		w.decide(i)
	}
}

// sweep decides about waiting payments, also about those whose order never came if it is lost.
func (w *world) sweep(isLost bool) {
	for n := range w.money {
		i := n
		if w.bFirst {
			i = 1 - n
		}
		if w.money[i].state != order.PaymentWaiting {
			continue
		}
		if w.decide(i); isLost && w.money[i].state == order.PaymentWaiting {
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
	return w.status != "" && w.status != order.StatusConfirmed && !w.archived
}

// played is one order in Postgres.
type played struct {
	pool  *pgxpool.Pool
	l     *ledger.Ledger
	event order.OrderReserved
}

func (p played) reference(i int) string { return fmt.Sprint(p.event.OrderID, "-", i) }

func (p played) report(ctx context.Context, i int) error {
	_, err := p.l.Report(ctx, order.Money{Reference: p.reference(i), OrderID: p.event.OrderID, Amount: 5, Currency: "EUR"})
	return err
}

func (p played) sweep(ctx context.Context, isComing bool) error {
	_, err := p.l.SweepPayments(ctx, func(context.Context, uuid.UUID) (bool, error) { return isComing, nil })
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
	late = step{"late", func(w *world) {
		w.overdue = w.overdue || w.status == order.StatusConfirmed
	}, func(ctx context.Context, p played) error {
		_ = testwork.MoveDue(ctx, p.pool, "pay_clock() - interval '1 min'", p.event.OrderID) // if there is an order
		return quietly(ledger.Heartbeat{Pool: p.pool, Logger: slog.New(slog.DiscardHandler)}.Send(ctx))
	}}
	expire = step{"expire", func(w *world) {
		if w.overdue && w.status == order.StatusConfirmed && !w.archived {
			w.status = order.StatusExpired
		}
	}, func(ctx context.Context, p played) error {
		return quietly(ledger.SweepSales(ctx, ledger.NewExpirer(p.l, slog.New(slog.DiscardHandler)).ExpireSome))
	}}
	cancel = step{"cancel", func(w *world) {
		if w.status == order.StatusConfirmed && !w.overdue {
			w.status = order.StatusCancelled
		}
	}, func(ctx context.Context, p played) error {
		return quietly(p.l.Cancel(ctx, p.event.OrderID, p.event.UserID))
	}}
	withdraw = step{"withdraw", func(w *world) {
		if w.status == order.StatusPaid && !w.archived {
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
		_, err := p.pool.Exec(ctx, `UPDATE payment_events SET occurred_at = occurred_at - interval '11 minutes'
			WHERE order_id = $1 AND version = 1`, p.event.OrderID)
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
			if m.state != order.PaymentWaiting && m.reason != order.RefundOrderNotFound {
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
		AND NOT EXISTS (SELECT FROM payments WHERE sale_id = $1 AND state IN ('waiting', 'refund_due'))`, p.event.SaleID)
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
	record, void, reportA, reportB, late, expire, cancel, withdraw, sweep, lose, refund, archived,
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
		for _, s := range steps {
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
			sql.AuditPayments)
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
	for _, s := range steps {
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
	require.Len(t, tried, len(states)*len(steps))
	requireNoMoneyLost(t, pool)
}

// Two steps at once lead where one of their orders leads.
func TestConcurrentMoneyFollowsModel(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	testwork.Heartbeat(t, pool)
	atOnce := []step{record, reportA, reportB, expire, cancel, withdraw, sweep, refund}
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
				if x.name == expire.name || y.name == expire.name { // it skips an order that the other has locked, and comes again
					require.NoError(t, expire.play(t.Context(), p))
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
