package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/internal/pg"
	"stampede/internal/telemetry"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file keeps the money that Stampede was told of. order/transition.go decides about it, payment_batch.go writes
// what was decided about several reports in one transaction, and paymentLine brings reports together that come at
// the same time.

// Report keeps money that was reported, pays its order with it or makes its refund due, in one transaction, and returns
// what became of it. Money for an order that Postgres does not have waits (SweepPayments), and so does money for an
// order whose records are damaged, for who mends them. A repeat changes nothing and returns what became of the first
// report. A repeat that says something else is kept as an unclear payment of its own (Money.KeyOfContradiction), unless
// it says what the first report could not (Money.Mends).
//
// What counts is the time of the call: money that waits here, or for its order, is not late.
//
// The error is an *order.InvalidError for the reference, or one of Postgres. Then the same report is safe to repeat.
func (l *Ledger) Report(ctx context.Context, m order.Money) (order.Payment, error) {
	r := &report{Money: m}
	err := r.Validate()
	if err == nil {
		err = l.line.decide(ctx, l, r)
	}
	if errors.Is(err, order.ErrDamaged) {
		r = &report{Money: m, blind: true}
		err = l.decideTogether(ctx, []*report{r}, false)
	}
	if err != nil {
		return order.Payment{}, fmt.Errorf("report payment=%s order=%s: %w", m.Reference, m.OrderID, err)
	}
	return r.payment, nil
}

// Pay is Report by a buyer, for an own order, which is paid at its price. A buyer's word is no money: what no order
// takes makes no refund due, and is kept apart (order.PaymentClaimed), of each order only the first claimsMax. What the
// shop reports with the same reference takes the place of the claim.
//
// The error is an *order.InvalidError for the reference; order.ErrNotFound, also for another user's
// order; order.ErrExpired once the deadline has passed; wraps order.ErrIllegalTransition, and is an
// *order.AlreadyPaidError for an order paid with another reference; wraps order.ErrDamaged; or is
// one of Postgres.
func (l *Ledger) Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error) {
	r := &report{Money: order.Money{Reference: reference, OrderID: id}, user: &user}
	err := r.Validate()
	if err == nil {
		err = l.line.decide(ctx, l, r)
	}
	if err != nil {
		return order.Order{}, fmt.Errorf("pay order=%s: %w", id, err)
	}
	return r.order, nil
}

// Refund notes that a payment went back that is due for refund, or unclear, and returns it. A repeat changes nothing.
//
// The error is an *order.InvalidError for the reference of the refund, order.ErrPaymentNotFound, wraps
// order.ErrRefundNotDue, and is an *order.RefundedError for a payment that was refunded with another reference, or is
// one of Postgres.
func (l *Ledger) Refund(ctx context.Context, reference, refundReference, operator string) (order.Payment, error) {
	if err := order.ValidateRefundReference(refundReference); err != nil {
		return order.Payment{}, err
	}
	p, err := l.end(ctx, reference, func(p order.Payment) (order.Payment, error) {
		switch {
		case p.State == order.PaymentRefunded && p.RefundReference != refundReference:
			return p, &order.RefundedError{RefundReference: p.RefundReference}
		case p.State == order.PaymentRefundDue, p.State == order.PaymentUnclear:
			p.State, p.RefundReference, p.Operator = order.PaymentRefunded, refundReference, operator
		case p.State != order.PaymentRefunded:
			return p, order.ErrRefundNotDue
		}
		return p, nil
	})
	if err != nil {
		return order.Payment{}, fmt.Errorf("refund payment=%s: %w", reference, err)
	}
	return p, nil
}

// Dismiss notes that an operator has looked at an unclear payment, and that nothing of it has to go back. A repeat
// changes nothing.
//
// The error is an *order.InvalidError for the reason, order.ErrPaymentNotFound, order.ErrNotUnclear, or one of
// Postgres.
func (l *Ledger) Dismiss(ctx context.Context, reference, why, operator string) (order.Payment, error) {
	if err := order.ValidateReason(why); err != nil {
		return order.Payment{}, err
	}
	p, err := l.end(ctx, reference, func(p order.Payment) (order.Payment, error) {
		switch p.State {
		case order.PaymentUnclear:
			p.State, p.Note, p.Operator = order.PaymentDismissed, why, operator
		case order.PaymentDismissed:
		default:
			return p, order.ErrNotUnclear
		}
		return p, nil
	})
	if err != nil {
		return order.Payment{}, fmt.Errorf("dismiss payment=%s: %w", reference, err)
	}
	return p, nil
}

// end changes a payment, but not its order, to what decide returns: the same if nothing is left to do.
func (l *Ledger) end(
	ctx context.Context, reference string, decide func(order.Payment) (order.Payment, error),
) (order.Payment, error) {
	return l.endWith(ctx, reference, func(_ pgx.Tx, p order.Payment) (order.Payment, error) { return decide(p) })
}

// endWith is end with the transaction. The error is order.ErrArchived for a payment in an archive.
func (l *Ledger) endWith(
	ctx context.Context, reference string, decide func(pgx.Tx, order.Payment) (order.Payment, error),
) (p order.Payment, err error) {
	isNew := false
	err = l.untilRead(ctx, func(tx pgx.Tx) error {
		isNew = false
		before, err := findPayment(ctx, tx, reference)
		if err != nil {
			return err
		}
		if p, err = decide(tx, before); err != nil || p == before {
			return err
		}
		if isArchived, err := findArchived(ctx, tx, reference); err != nil || len(isArchived) > 0 {
			return cmp.Or(err, order.ErrArchived)
		}
		p.Version++
		isNew = true
		return addPaymentEvents(ctx, tx, []*order.Payment{&p})
	})
	if err == nil && isNew {
		l.onPayment(p.State, p.Reason)
	}
	return p, err
}

// Payment returns the payment with this reference, or order.ErrPaymentNotFound.
func (l *Reader) Payment(ctx context.Context, reference string) (order.Payment, error) {
	return findPayment(ctx, l.pool, reference)
}

// Payments returns the payments with these references by them, but for those in archives.
func (l *Reader) Payments(ctx context.Context, references []string) (map[string]order.Payment, error) {
	rows, _ := l.pool.Query(ctx, sql.PaymentFind, references) // rows carry the error
	found, err := pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return nil, fmt.Errorf("find payments: %w", err)
	}
	payments := make(map[string]order.Payment, len(found))
	for _, p := range found {
		payments[p.Reference] = p
	}
	return payments, nil
}

// WithPayments returns a Ledger that also calls onPayment, once, with each state that it brings a payment to, and the
// reason.
func (l *Ledger) WithPayments(onPayment func(order.PaymentState, order.PaymentReason)) *Ledger {
	counting := *l
	counting.onPayment = onPayment
	return &counting
}

// CountPayments registers the counter of a process, for all its ledgers, and returns what counts for WithPayments.
func CountPayments(reg prometheus.Registerer) (func(order.PaymentState, order.PaymentReason), error) {
	counted, err := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_payments_total",
		Help: "Payments that ingresses and workers brought to a state, by it and the reason. The state claimed is that of " +
			"buyers' words, which are no money.",
	}, []string{"state", "reason"}))
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	count := func(state order.PaymentState, reason order.PaymentReason) prometheus.Counter {
		return counted.WithLabelValues(string(state), string(reason))
	}
	// They exist before the first payment, which increase() would miss otherwise.
	for _, state := range []order.PaymentState{
		order.PaymentWaiting, order.PaymentSettled, order.PaymentDisputed, order.PaymentClaimed,
	} {
		count(state, "")
	}
	for _, reason := range order.RefundReasons() {
		count(order.PaymentRefundDue, reason)
		count(order.PaymentRefunded, reason)
		count(order.PaymentClaimed, reason)
		count(order.PaymentDisputed, reason)
	}
	count(order.PaymentRefunded, order.RefundedOutside)
	for _, reason := range order.UnclearReasons() {
		count(order.PaymentUnclear, reason)
		count(order.PaymentDismissed, reason)
		count(order.PaymentRefunded, reason)
		count(order.PaymentDisputed, reason)
	}
	return func(state order.PaymentState, reason order.PaymentReason) { count(state, reason).Inc() }, nil
}

// findPayment returns the payment with this reference, also one in an archive, or order.ErrPaymentNotFound.
func findPayment(ctx context.Context, on pg.Querier, reference string) (order.Payment, error) {
	rows, _ := on.Query(ctx, sql.PaymentFind, []string{reference}) // rows carry the error
	p, err := pgx.CollectExactlyOneRow(rows, scanPayment)
	if !errors.Is(err, pgx.ErrNoRows) {
		return p, err
	}
	found, err := findArchived(ctx, on, reference)
	if err == nil && len(found) == 0 {
		err = order.ErrPaymentNotFound
	}
	if err != nil {
		return order.Payment{}, err
	}
	return found[0], nil
}

// findPaying returns the payment that paid the order, or ErrDamaged if there is none.
func findPaying(ctx context.Context, on pg.Querier, o order.Order) (order.Payment, error) {
	m := order.Money{Reference: o.PaymentReference, OrderID: o.ID}
	rows, _ := on.Query(ctx, sql.PaymentFind, []string{m.Reference, m.KeyOfClaim()}) // rows carry the error
	found, err := pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return order.Payment{}, err
	}
	for _, p := range found {
		paid := p.State == order.PaymentSettled || p.State == order.PaymentDisputed || p.State == order.PaymentRefunded
		if paid && p.OrderID == o.ID {
			return p, nil
		}
	}
	return order.Payment{}, fmt.Errorf("%w: no payment has settled it", order.ErrDamaged)
}

func scanPayment(row pgx.CollectableRow) (order.Payment, error) {
	r, err := pgx.RowToStructByName[paymentRow](row)
	return r.payment(), err
}

// paymentRow is a payment as the queries return it.
type paymentRow struct {
	Reference             string
	Version               int
	Position              int64
	OrderID, SaleID       zeronull.UUID
	Amount                zeronull.Int8
	Currency              zeronull.Text
	State                 order.PaymentState
	Reason                order.PaymentReason
	ReceivedAt, UpdatedAt time.Time
	Data                  paymentData
}

// paymentData is what few events of payments have.
type paymentData struct {
	RefundReference string `json:"refund_reference,omitempty"`
	Operator        string `json:"operator,omitempty"`
	Unreadable      string `json:"unreadable,omitempty"`
	Note            string `json:"note,omitempty"`
	Dispute         string `json:"dispute,omitempty"`
}

func (r *paymentRow) payment() order.Payment {
	return order.Payment{
		Money: order.Money{
			Reference: r.Reference, OrderID: uuid.UUID(r.OrderID), Amount: int64(r.Amount), Currency: string(r.Currency),
			Unreadable: r.Data.Unreadable,
		},
		SaleID: uuid.UUID(r.SaleID), State: r.State, Reason: r.Reason, ReceivedAt: r.ReceivedAt.UTC(),
		UpdatedAt: r.UpdatedAt.UTC(), RefundReference: r.Data.RefundReference, Operator: r.Data.Operator, Note: r.Data.Note,
		Dispute: r.Data.Dispute, Position: r.Position, Version: r.Version,
	}
}

// errReadAgain is returned by a transaction in which a payment, or the sale of an order, is not any more as it was
// read.
var errReadAgain = errors.New("a payment was changed at the same time")

// untilRead runs a transaction, and runs it again while others change what it has read.
func (l *Ledger) untilRead(ctx context.Context, f func(pgx.Tx) error) (err error) {
	const tries = 10
	for range tries {
		err = pg.InTransaction(ctx, l.pool, pgx.TxOptions{BeginQuery: beginRecording + "; " + l.limitLocks + beginPlanned},
			func(tx pgx.Tx) error {
				err := f(tx)
				refused, ok := errors.AsType[*pgconn.PgError](err)
				if ok && refused.TableName == "payment_events" && hasClass(refused, "23") { // payment/add_events.sql
					err = fmt.Errorf("%w: %w", errReadAgain, err)
				}
				return err
			})
		if !errors.Is(err, errReadAgain) {
			break
		}
	}
	return err
}

// beginPlanned keeps Postgres from planning the statements of a transaction again for its parameters. The planner takes
// more time than these statements, because of the tables of all months.
const beginPlanned = "; SET LOCAL plan_cache_mode = force_generic_plan"

// addPaymentEvents adds the latest events of payments, given as they are afterwards, and sets their positions and
// times. Several events of one payment are in their order.
func addPaymentEvents(ctx context.Context, tx pgx.Tx, payments []*order.Payment) error {
	rows, _ := tx.Query(ctx, sql.PaymentAddEvents, paymentColumns(payments)...) // rows carry the error
	return readPositions(rows, payments)
}

func paymentColumns(payments []*order.Payment) []any {
	n := len(payments)
	references, versions, types := make([]string, n), make([]int, n), make([]order.PaymentEvent, n)
	orders, sales := make([]zeronull.UUID, n), make([]zeronull.UUID, n)
	amounts, data := make([]zeronull.Int8, n), make([]paymentData, n)
	currencies, reasons := make([]zeronull.Text, n), make([]zeronull.Text, n)
	for i, p := range payments {
		references[i], versions[i], types[i] = p.Reference, p.Version, p.State.EventOf()
		orders[i], sales[i] = zeronull.UUID(p.OrderID), zeronull.UUID(p.SaleID)
		amounts[i], currencies[i], reasons[i] = zeronull.Int8(p.Amount), zeronull.Text(p.Currency), zeronull.Text(p.Reason)
		data[i] = paymentData{p.RefundReference, p.Operator, p.Unreadable, p.Note, p.Dispute}
	}
	return []any{references, versions, types, orders, sales, amounts, currencies, reasons, data}
}

func readPositions(rows pgx.Rows, payments []*order.Payment) error {
	i := 0
	var position int64
	var at time.Time
	_, err := pgx.ForEachRow(rows, []any{&position, &at}, func() error {
		p := payments[i]
		p.Position, p.UpdatedAt = position, at.UTC()
		if p.ReceivedAt.IsZero() {
			p.ReceivedAt = p.UpdatedAt
		}
		i++
		return nil
	})
	return err
}

// Here begins what happens to money at the payment provider without Stampede.

// RefundedAtProvider notes that money went back at the payment provider, and returns the payment. A refund that was due
// is done then. Else its order stays as it is, and the payment says that it was refunded outside. Money that was not
// reported before pays no order. A repeat changes nothing.
//
// The error is an *order.InvalidError for a reference, or one of Postgres.
func (l *Ledger) RefundedAtProvider(ctx context.Context, r order.ProviderRefund) (order.Payment, error) {
	if err := errors.Join(r.Validate(), order.ValidateRefundReference(r.RefundReference)); err != nil {
		return order.Payment{}, err
	}
	p, err := l.end(ctx, r.Reference, func(p order.Payment) (order.Payment, error) { return p.RefundedAt(r), nil })
	if errors.Is(err, order.ErrPaymentNotFound) {
		p, err = l.keepRefunded(ctx, r)
	}
	if err != nil {
		return order.Payment{}, fmt.Errorf("refund payment=%s at the provider: %w", r.Reference, err)
	}
	return p, nil
}

// keepRefunded keeps money that was not reported before, and its refund. If its buyer has claimed it, it is reported
// first, so that it counts once.
func (l *Ledger) keepRefunded(ctx context.Context, r order.ProviderRefund) (p order.Payment, err error) {
	received := order.Payment{Money: r.Money, State: order.PaymentWaiting, Version: 1}
	err = l.untilRead(ctx, func(tx pgx.Tx) error {
		o, err := l.lockOrder(ctx, tx, r.OrderID, nil) // before the claim, which its buyer may make now
		if err != nil && !errors.Is(err, order.ErrNotFound) {
			return err
		}
		claim, err := findPayment(ctx, tx, r.KeyOfClaim())
		if err != nil && !errors.Is(err, order.ErrPaymentNotFound) {
			return err
		}
		if p = received.RefundedAt(r); p.State == received.State || err == nil && claim.State != order.PaymentClaimed {
			return errReport
		}
		received.SaleID, p.SaleID = o.SaleID, o.SaleID
		p.Version++
		return addPaymentEvents(ctx, tx, []*order.Payment{&received, &p})
	})
	switch {
	case errors.Is(err, errReport):
		if p, err = l.Report(ctx, r.Money); err == nil && p.Reference == r.Reference {
			return l.RefundedAtProvider(ctx, r)
		}
	case errors.Is(err, errReadAgain): // it was reported at the same time
		return l.RefundedAtProvider(ctx, r)
	case err == nil:
		l.onPayment(p.State, p.Reason)
	}
	return p, err
}

// errReport says that money has to be reported before its refund.
var errReport = errors.New("the money was not reported")

// Disputed notes a dispute about a payment, or how it ended, and returns the payment. The order stays as it is. A
// repeat changes nothing.
//
// The error is an *order.InvalidError for a reference, order.ErrPaymentNotFound, or one of Postgres.
func (l *Ledger) Disputed(ctx context.Context, d order.Dispute) (order.Payment, error) {
	if err := order.ValidateReference(d.ID); err != nil {
		return order.Payment{}, err
	}
	p, err := l.endWith(ctx, d.Reference, func(tx pgx.Tx, p order.Payment) (order.Payment, error) {
		next := p.Disputed(d)
		if p.State != order.PaymentDisputed || next.State != order.PaymentSettled {
			return next, nil
		}
		// An operator may have cancelled the order meanwhile.
		switch o, err := l.lockOrder(ctx, tx, p.OrderID, nil); {
		case errors.Is(err, order.ErrNotFound): // its sale is archived
		case err != nil:
			return p, err
		case o.Status != order.StatusPaid:
			next.State, next.Reason = order.PaymentRefundDue, order.RefundOrderCancelled
		}
		return next, nil
	})
	if err != nil {
		return order.Payment{}, fmt.Errorf("dispute=%s of payment=%s: %w", d.ID, d.Reference, err)
	}
	return p, nil
}
