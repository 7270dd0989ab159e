package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file keeps the money that Stampede was told of. order/transition.go decides about it.

// Report keeps money that was reported, pays its order with it or makes its refund due, in one transaction, and returns
// what became of it. Money for an order that Postgres does not have waits (SweepPayments). A repeat changes nothing and
// returns what became of the first report, also if it says something else.
//
// The error is an *order.InvalidError for the reference, wraps order.ErrDamaged, or is one of Postgres. Then the same
// report is safe to repeat.
func (l *Ledger) Report(ctx context.Context, m order.Money) (order.Payment, error) {
	payment, _, err := l.report(ctx, m, nil, m.Reference)
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

// report keeps the money under a key. The order is the user's, or anybody's if that is nil. It returns the order as it
// is afterwards, zero if there is none.
func (l *Ledger) report(
	ctx context.Context, m order.Money, user *string, key string,
) (payment order.Payment, o order.Order, err error) {
	if err := m.Validate(); err != nil {
		return payment, o, err
	}
	var changed []order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		changed = nil
		d, err := l.decide(ctx, tx, &m, user)
		if err != nil {
			return err
		}
		o = d.before
		data := map[string]string{}
		if m.Unreadable != "" {
			data["unreadable"] = m.Unreadable
		}
		var isNew bool
		err = tx.QueryRow(ctx, sql.PaymentReport, key, zeronull.UUID(m.OrderID), zeronull.UUID(o.SaleID),
			zeronull.Int8(m.Amount), zeronull.Text(m.Currency), data, zeronull.Text(d.event), zeronull.Text(d.reason)).Scan(&isNew)
		if err == nil && isNew && d.event == order.EventPaymentSettled {
			changed = []order.Order{d.before}
			o, err = l.settle(ctx, tx, d, m.Reference)
		}
		if err == nil {
			payment, err = findPayment(ctx, tx, key)
		}
		return err
	})
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
// are in neither store after ten minutes: mayCome tells that an order may still come to Postgres. It returns how many
// it has decided about.
func (l *Ledger) SweepPayments(
	ctx context.Context, mayCome func(ctx context.Context, id uuid.UUID) (bool, error),
) (decided int, err error) {
	type waiting struct {
		Reference string
		OrderID   uuid.UUID
		Old       bool
	}
	rows, _ := l.pool.Query(ctx, sql.PaymentWaiting, orderAwaited.Seconds(), paymentsMax) // rows carry the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[waiting])
	if err != nil {
		return 0, fmt.Errorf("find waiting payments: %w", err)
	}
	var failed []error
	for _, w := range found {
		isDecided, err := l.decideWaiting(ctx, w.Reference, func(ctx context.Context) (bool, error) {
			if !w.Old {
				return true, nil
			}
			return mayCome(ctx, w.OrderID)
		})
		if err != nil {
			failed = append(failed, fmt.Errorf("payment=%s order=%s: %w", w.Reference, w.OrderID, err))
		}
		if isDecided {
			decided++
		}
	}
	return decided, errors.Join(failed...)
}

// decideWaiting decides about a payment that waits.
func (l *Ledger) decideWaiting(
	ctx context.Context, reference string, mayCome func(context.Context) (bool, error),
) (decided bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	var changed []order.Order
	var paid order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		decided, changed = false, nil
		p, err := findPayment(ctx, tx, reference)
		if err != nil || p.State != order.PaymentWaiting {
			return err
		}
		d, err := l.decide(ctx, tx, &p.Money, nil)
		if err == nil && d.event == "" {
			var isComing bool
			if isComing, err = mayCome(ctx); isComing || err != nil {
				return err
			}
			d.event, d.reason = order.EventPaymentRefundDue, order.RefundOrderNotFound
		}
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, sql.PaymentDecide, reference, zeronull.UUID(d.before.SaleID), d.event,
			zeronull.Text(d.reason)).Scan(new(int64))
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return nil
		case err == nil && d.event == order.EventPaymentSettled:
			changed = []order.Order{d.before}
			paid, err = l.settle(ctx, tx, d, reference)
		}
		decided = err == nil
		return err
	})
	if hasCode(err, uniqueViolation) { // another worker decided first
		return false, nil
	}
	return decided && err == nil, l.announce(changed, paid, err)
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
	err := l.inTransaction(ctx, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, sql.PaymentRefunded, reference, refundReference, operator).Scan(new(int64))
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		p, err = findPayment(ctx, tx, reference)
		return err
	})
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

// ListPayments returns at most limit payments that match, in the order of their latest events, after that position.
// next is where the next page begins, or 0 at the end.
func (l *Ledger) ListPayments(
	ctx context.Context, f order.PaymentFilter, after int64, limit int,
) (payments []order.Payment, next int64, err error) {
	query, args := sql.PaymentList, []any{after, limit + 1, zeronull.Text(f.State)}
	if f.State == order.PaymentRefundDue {
		query, args = sql.PaymentListDue, args[:2]
	}
	rows, _ := l.pool.Query(ctx, query, append(args, zeronull.UUID(f.Sale), zeronull.UUID(f.Order))...) // rows carry the error
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
	rows, _ := on.Query(ctx, sql.PaymentFind, reference) // rows carry the error
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
