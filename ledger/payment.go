package ledger

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/telemetry"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file keeps the money that Stampede was told of. order/transition.go decides about it.

// Report keeps money that was reported, pays its order with it or makes its refund due, in one transaction, and returns
// what became of it. Money for an order that Postgres does not have waits (SweepPayments). A repeat changes nothing and
// returns what became of the first report, also if it says something else.
//
// Money for an order whose records are damaged waits for who mends them.
//
// The error is an *order.InvalidError for the reference, or one of Postgres. Then the same report is safe to repeat.
func (l *Ledger) Report(ctx context.Context, m order.Money) (order.Payment, error) {
	payment, _, err := l.report(ctx, m, nil, m.Reference)
	if errors.Is(err, order.ErrDamaged) {
		payment, err = l.keepWaiting(ctx, m)
	}
	if err != nil {
		return order.Payment{}, fmt.Errorf("report payment=%s order=%s: %w", m.Reference, m.OrderID, err)
	}
	return payment, nil
}

// Pay is Report by a buyer, for an own order, which is paid at its price. Buyers' references are kept with the order,
// so that none of them takes one of a payment provider.
//
// The error is an *order.InvalidError for the reference; order.ErrNotFound, also for another user's
// order; order.ErrExpired once the deadline has passed; wraps order.ErrIllegalTransition, and is an
// *order.AlreadyPaidError for an order paid with another reference; wraps order.ErrDamaged; or is
// one of Postgres. The refund of a payment that is refused is due.
func (l *Ledger) Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error) {
	payment, o, err := l.report(ctx, order.Money{Reference: reference, OrderID: id}, &user, id.String()+":"+reference)
	if err == nil && (o.Status != order.StatusPaid || o.PaymentReference != reference) {
		err = o.Refusal(payment.Reason)
	}
	if err != nil {
		return order.Order{}, fmt.Errorf("pay order=%s: %w", id, err)
	}
	return o, nil
}

// keepWaiting keeps money without a look at its order.
func (l *Ledger) keepWaiting(ctx context.Context, m order.Money) (payment order.Payment, err error) {
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		if _, err := insertPayment(ctx, tx, m.Reference, m, decision{}); err != nil {
			return err
		}
		payment, err = findPayment(ctx, tx, m.Reference)
		return err
	})
	return payment, err
}

// insertPayment writes the report of the money with the decision. It returns false if the key has a payment.
func insertPayment(ctx context.Context, tx pgx.Tx, key string, m order.Money, d decision) (isNew bool, err error) {
	data := map[string]string{}
	if m.Unreadable != "" {
		data["unreadable"] = m.Unreadable
	}
	err = tx.QueryRow(ctx, sql.PaymentReport, key, zeronull.UUID(m.OrderID), zeronull.UUID(d.before.SaleID),
		zeronull.Int8(m.Amount), zeronull.Text(m.Currency), data, zeronull.Text(d.event),
		zeronull.Text(d.reason)).Scan(&isNew)
	return isNew, err
}

// report keeps the money under a key. The order is the user's, or anybody's if that is nil. It returns the order as it
// is afterwards, zero if there is none.
func (l *Ledger) report(
	ctx context.Context, m order.Money, user *string, key string,
) (payment order.Payment, o order.Order, err error) {
	if err := m.Validate(); err != nil {
		return payment, o, err
	}
	var changed []order.Order
	var isNew bool
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		changed, isNew = nil, false
		d, err := l.decide(ctx, tx, &m, user)
		if err != nil {
			return err
		}
		if d.before.Status == order.StatusPaid && d.before.PaymentReference == m.Reference {
			// The same money was reported in the other way: by the shop, or by the buyer.
			if payment, err = findSettled(ctx, tx, m.OrderID); !errors.Is(err, order.ErrPaymentNotFound) {
				o = d.before
				return err
			}
		}
		crashpoint.Hit(crashpoint.BeforePayment)
		if isNew, err = insertPayment(ctx, tx, key, m, d); errors.Is(err, pgx.ErrNoRows) { // its sale was archived in between
			if d, err = l.decide(ctx, tx, &m, user); err == nil {
				isNew, err = insertPayment(ctx, tx, key, m, d)
			}
		}
		crashpoint.Hit(crashpoint.PaymentInserted)
		if o = d.before; err == nil && isNew && d.event == order.EventPaymentSettled {
			changed = []order.Order{d.before}
			o, err = l.settle(ctx, tx, d, m.Reference)
		}
		if err == nil {
			payment, err = findPayment(ctx, tx, key)
		}
		crashpoint.Hit(crashpoint.BeforePaymentCommit)
		return err
	})
	crashpoint.Hit(crashpoint.AfterPayment)
	if err == nil && isNew {
		l.noted(payment.State, payment.Reason)
	}
	return payment, o, l.announce(changed, o, err)
}

// decision is what the rule says about money.
type decision struct {
	event  order.PaymentEvent // empty to wait
	reason order.RefundReason
	// before is the order, locked; zero if there is none. after is the order after its payment.
	before, after order.Order
}

// decide locks the order of the money and applies the rule. A buyer is told of an order that does not exist.
func (l *Ledger) decide(ctx context.Context, tx pgx.Tx, m *order.Money, user *string) (d decision, err error) {
	if m.OrderID == uuid.Nil && user == nil {
		return decision{event: order.EventPaymentRefundDue, reason: order.RefundOrderNotFound}, nil
	}
	locked, overdue, err := l.LockOrder(ctx, tx, m.OrderID, user)
	switch {
	case errors.Is(err, order.ErrNotFound) && user == nil:
		return d, nil
	case FaultOf(err) == BadData:
		return d, fmt.Errorf("%w: %w", order.ErrDamaged, err)
	case err != nil:
		return d, err
	}
	d.before = locked.Order
	if user != nil {
		m.Amount, m.Currency = d.before.Amount, d.before.Currency
	}
	if d.after, d.reason = d.before.Paid(*m, overdue); d.reason != "" {
		d.event = order.EventPaymentRefundDue
		return d, nil
	}
	d.event = order.EventPaymentSettled
	return d, nil
}

// settle writes the payment of the order.
func (l *Ledger) settle(ctx context.Context, tx pgx.Tx, d decision, reference string) (paid order.Order, err error) {
	paid = d.after
	paid.PaymentReference = reference
	paid.UpdatedAt, err = writeChange(ctx, tx, change{event: order.EventPaid}, []order.Order{d.before}, paid)
	if err == nil {
		err = noteTrace(ctx, tx, paid)
	}
	return paid, err
}

const (
	// orderAwaited is how long money waits for an order that is in neither store.
	orderAwaited = 10 * time.Minute
	// paymentsMax bounds the payments of one look.
	paymentsMax = 1000
)

// SweepPayments decides about payments whose orders Postgres has by now, and makes the refund of those due whose orders
// are in neither store after ten minutes: mayCome tells that an order may still come to Postgres. It is asked before
// Postgres, so that an order which comes in between is found there. It returns how many it has decided about, and the
// first error.
func (l *Ledger) SweepPayments(
	ctx context.Context, mayCome func(ctx context.Context, id uuid.UUID) (bool, error),
) (decided int, err error) {
	rows, _ := l.pool.Query(ctx, sql.PaymentWaiting, orderAwaited.Seconds(), paymentsMax) // rows carry the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		Reference string
		OrderID   uuid.UUID
		Old       bool
	}])
	if err != nil {
		return 0, fmt.Errorf("find waiting payments: %w", err)
	}
	var failed error
	for _, w := range found {
		isComing, isDecided, err := true, false, error(nil)
		if w.Old {
			isComing, err = mayCome(ctx, w.OrderID)
		}
		if err == nil {
			isDecided, err = l.decideWaiting(ctx, w.Reference, isComing)
		}
		if err != nil && failed == nil {
			failed = fmt.Errorf("payment=%s order=%s: %w", w.Reference, w.OrderID, err)
		}
		if isDecided {
			decided++
		}
	}
	return decided, failed
}

// decideWaiting decides about a payment that waits. It goes on to wait for an order that is coming.
func (l *Ledger) decideWaiting(ctx context.Context, reference string, isComing bool) (decided bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	var changed []order.Order
	var paid order.Order
	var d decision
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		decided, changed = false, nil
		p, err := findPayment(ctx, tx, reference)
		if err != nil || p.State != order.PaymentWaiting {
			return err
		}
		d, err = l.decide(ctx, tx, &p.Money, nil)
		switch {
		case err != nil:
			return err
		case d.event == "" && isComing:
			return nil
		case d.event == "":
			d.event, d.reason = order.EventPaymentRefundDue, order.RefundOrderNotFound
		}
		crashpoint.Hit(crashpoint.BeforePayment)
		err = tx.QueryRow(ctx, sql.PaymentDecide, reference, zeronull.UUID(d.before.SaleID), d.event,
			zeronull.Text(d.reason)).Scan(new(int64))
		if errors.Is(err, pgx.ErrNoRows) { // it is decided, or its sale was archived
			return nil
		}
		crashpoint.Hit(crashpoint.PaymentInserted)
		if err == nil && d.event == order.EventPaymentSettled {
			changed = []order.Order{d.before}
			paid, err = l.settle(ctx, tx, d, reference)
		}
		crashpoint.Hit(crashpoint.BeforePaymentCommit)
		decided = err == nil
		return err
	})
	if hasCode(err, uniqueViolation) { // another worker decided first
		return false, nil
	}
	crashpoint.Hit(crashpoint.AfterPayment)
	if decided = decided && err == nil; decided {
		l.noted(d.event.State(), d.reason)
	}
	return decided, l.announce(changed, paid, err)
}

// Refund notes that a payment whose refund is due was refunded, and returns it. A repeat changes nothing.
//
// The error is an *order.InvalidError for the reference of the refund, order.ErrPaymentNotFound, wraps
// order.ErrRefundNotDue, and is an *order.RefundedError for a payment that was refunded with another reference, or is
// one of Postgres.
func (l *Ledger) Refund(ctx context.Context, reference, refundReference, operator string) (order.Payment, error) {
	if err := order.ValidateRefundReference(refundReference); err != nil {
		return order.Payment{}, err
	}
	var p order.Payment
	var isNew bool
	err := l.inTransaction(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, sql.PaymentRefunded, reference, refundReference, operator).Scan(new(int64))
		if isNew = err == nil; !isNew && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		p, err = findPayment(ctx, tx, reference)
		return err
	})
	if err == nil && isNew {
		l.noted(p.State, p.Reason)
	}
	if hasCode(err, uniqueViolation) { // another operator was first
		p, err = l.Payment(ctx, reference)
	}
	switch {
	case err != nil:
	case p.State != order.PaymentRefunded:
		err = order.ErrRefundNotDue
	case p.RefundReference != refundReference:
		err = &order.RefundedError{RefundReference: p.RefundReference}
	}
	if err != nil {
		return order.Payment{}, fmt.Errorf("refund payment=%s: %w", reference, err)
	}
	return p, nil
}

// Payment returns the payment with this reference, or order.ErrPaymentNotFound.
func (l *Ledger) Payment(ctx context.Context, reference string) (order.Payment, error) {
	return findPayment(ctx, l.pool, reference)
}

// ListPayments returns at most limit payments that match, in the order of their latest events, after that position, or
// from the beginning if that is 0: positions of an archive of another database are negative. next is where the next
// page begins, or 0 at the end.
func (l *Ledger) ListPayments(
	ctx context.Context, f order.PaymentFilter, after int64, limit int,
) (payments []order.Payment, next int64, err error) {
	if after == 0 {
		after = math.MinInt64
	}
	query, args := sql.PaymentList, []any{after, limit + 1, zeronull.Text(f.State)}
	if f.State == order.PaymentRefundDue {
		query, args = sql.PaymentListDue, args[:2]
	}
	args = append(args, zeronull.UUID(f.Sale), zeronull.UUID(f.Order))
	rows, _ := l.pool.Query(ctx, query, args...) // rows carry the error
	payments, err = pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return nil, 0, fmt.Errorf("list payments: %w", err)
	}
	if len(payments) > limit {
		payments = payments[:limit]
		next = payments[limit-1].Position
	}
	return payments, next, nil
}

// WithPayments returns a Ledger that also calls noted, once, with each state that it brings a payment to, and the
// reason of the refund.
func (l *Ledger) WithPayments(noted func(order.PaymentState, order.RefundReason)) *Ledger {
	counting := *l
	counting.noted = noted
	return &counting
}

// CountPayments registers the counter of a process, for all its ledgers, and returns what counts for WithPayments.
func CountPayments(reg prometheus.Registerer) (func(order.PaymentState, order.RefundReason), error) {
	counted, err := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_payments_total",
		Help: "Payments that ingresses and workers brought to the state waiting, settled, refund_due or refunded, by it and " +
			"the reason of the refund.",
	}, []string{"state", "reason"}))
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	count := func(state order.PaymentState, reason order.RefundReason) prometheus.Counter {
		return counted.WithLabelValues(string(state), string(reason))
	}
	for _, state := range []order.PaymentState{order.PaymentWaiting, order.PaymentSettled} {
		count(state, "") // it exists before the first payment, which increase() would miss otherwise
	}
	for _, reason := range order.RefundReasons() {
		count(order.PaymentRefundDue, reason)
		count(order.PaymentRefunded, reason)
	}
	return func(state order.PaymentState, reason order.RefundReason) { count(state, reason).Inc() }, nil
}

// RefundsDue are the refunds that are due in a currency.
type RefundsDue struct {
	// Currency is empty for payments without an amount.
	Currency string
	Payments int64
	// Amount is their sum, in minor units.
	Amount int64
	// Since is when the oldest of them became due.
	Since time.Time
}

// RefundsDue returns the refunds that are due, by currency.
func (l *Ledger) RefundsDue(ctx context.Context) ([]RefundsDue, error) {
	rows, _ := l.pool.Query(ctx, sql.PaymentDue) // rows carry the error
	due, err := pgx.CollectRows(rows, pgx.RowToStructByName[RefundsDue])
	if err != nil {
		return nil, fmt.Errorf("sum refunds: %w", err)
	}
	return due, nil
}

func findPayment(ctx context.Context, on pg.Querier, reference string) (order.Payment, error) {
	return onePayment(on.Query(ctx, sql.PaymentFind, reference))
}

// findSettled returns the payment that settled the order.
func findSettled(ctx context.Context, tx pgx.Tx, id uuid.UUID) (order.Payment, error) {
	return onePayment(tx.Query(ctx, sql.PaymentList, 0, 1, order.PaymentSettled, nil, id))
}

// onePayment returns the payment that a query finds, or order.ErrPaymentNotFound. The rows carry its error.
func onePayment(rows pgx.Rows, _ error) (order.Payment, error) {
	p, err := pgx.CollectExactlyOneRow(rows, scanPayment)
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrPaymentNotFound
	}
	return p, err
}

func scanPayment(row pgx.CollectableRow) (order.Payment, error) {
	r, err := pgx.RowToStructByName[struct {
		Reference             string
		Version               int
		Position              int64
		OrderID, SaleID       zeronull.UUID
		Amount                zeronull.Int8
		Currency              zeronull.Text
		State                 order.PaymentState
		Reason                order.RefundReason
		ReceivedAt, UpdatedAt time.Time
		RefundReference       string
		Operator, Unreadable  string
	}](row)
	return order.Payment{
		Money: order.Money{
			Reference: r.Reference, OrderID: uuid.UUID(r.OrderID), Amount: int64(r.Amount), Currency: string(r.Currency),
			Unreadable: r.Unreadable,
		},
		SaleID: uuid.UUID(r.SaleID), State: r.State, Reason: r.Reason, ReceivedAt: r.ReceivedAt.UTC(),
		UpdatedAt: r.UpdatedAt.UTC(), RefundReference: r.RefundReference, Operator: r.Operator, Position: r.Position,
		Version: r.Version,
	}, err
}
