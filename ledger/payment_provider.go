package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"stampede/reservation/order"
)

// This file keeps what happens to money at the payment provider without Stampede.

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
