package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/google/uuid"

	"stampede/internal/apiclient"
	"stampede/ledger"
	"stampede/reservation/order"
)

type paymentCmd struct {
	List      paymentListCmd      `cmd:"" help:"List payments, those first whose state changed longest ago. Amounts are in minor units."`
	Show      paymentShowCmd      `cmd:"" help:"Show a payment: its order, and what became of it."`
	Refunded  paymentRefundedCmd  `cmd:"" help:"Note that a payment whose refund is due, or that is unclear, was paid back. It moves no money. Repeating it changes nothing."`
	Dismissed paymentDismissedCmd `cmd:"" help:"Note that nothing of an unclear payment has to go back. Repeating it changes nothing."`
	Import    paymentImportCmd    `cmd:"" help:"Report the payments and refunds of a file, one JSON object a line, as POST /v1/payments takes them: {order_id, reference, amount, currency}, with the refund_reference of a payment that was refunded. Repeating it changes nothing. Exit status 1 if a line could not be taken."`
}

// payments are those in Postgres, or those that an ingress shows: *apiclient.Client.
type payments interface {
	Payment(ctx context.Context, reference string) (order.PaymentView, error)
	Payments(ctx context.Context, f order.PaymentFilter, limit int) (all []order.PaymentView, more bool, err error)
	Report(ctx context.Context, report json.RawMessage) (order.PaymentView, error)
	Refunded(ctx context.Context, reference, refundReference string) (order.PaymentView, error)
	Dismissed(ctx context.Context, reference, reason string) (order.PaymentView, error)
	Order(ctx context.Context, id uuid.UUID, user string) (order.HistoryView, error)
}

// withPayments calls do with the payments of the place that the flags name. Operator is who makes changes in Postgres.
func (f *postgresOrServer) withPayments(ctx context.Context, operator string, do func(payments) error) error {
	if err := f.checkPlace(); err != nil {
		return err
	}
	if f.Server != "" {
		return f.withClient(func(client *apiclient.Client) error { return do(client) })
	}
	return f.databaseFlag().withLedger(ctx, func(l *ledger.Ledger) error { return do(recordedPayments{l, operator}) })
}

// recordedPayments are the payments in Postgres.
type recordedPayments struct {
	ledger   *ledger.Ledger
	operator string
}

func (r recordedPayments) Payment(ctx context.Context, reference string) (order.PaymentView, error) {
	p, err := r.ledger.Payment(ctx, reference)
	return p.View(), err
}

func (r recordedPayments) Payments(
	ctx context.Context, f order.PaymentFilter, limit int,
) (all []order.PaymentView, more bool, err error) {
	const pageMax = 1000
	for next := int64(0); ; {
		var page []order.Payment
		if page, next, err = r.ledger.ListPayments(ctx, f, next, min(limit-len(all), pageMax)); err != nil {
			return nil, false, err
		}
		for _, p := range page {
			all = append(all, p.View())
		}
		if next == 0 || len(all) >= limit {
			return all, next != 0, nil
		}
	}
}

func (r recordedPayments) Report(ctx context.Context, report json.RawMessage) (order.PaymentView, error) {
	m, err := order.ReadMoney(report)
	if err != nil {
		return order.PaymentView{}, err
	}
	p, err := r.ledger.Report(ctx, m)
	return p.View(), err
}

func (r recordedPayments) Refunded(
	ctx context.Context, reference, refundReference string,
) (order.PaymentView, error) {
	p, err := r.ledger.Refund(ctx, reference, refundReference, r.operator)
	return p.View(), err
}

func (r recordedPayments) Dismissed(ctx context.Context, reference, reason string) (order.PaymentView, error) {
	p, err := r.ledger.Dismiss(ctx, reference, reason, r.operator)
	return p.View(), err
}

func (r recordedPayments) Order(ctx context.Context, id uuid.UUID, _ string) (order.HistoryView, error) {
	o, log, err := r.ledger.History(ctx, id)
	return o.ViewWith(log), err
}

type paymentArg struct {
	Reference string `arg:"" help:"Reference of the payment; of one that its buyer reported, ORDER:REFERENCE."`
}

type paymentListCmd struct {
	readOnly
	postgresOrServer
	outputFlag
	State string    `enum:",waiting,settled,refund_due,refunded,unclear,dismissed,disputed,claimed" default:"" env:"STAMPEDE_PAYMENT_STATE" placeholder:"STATE" help:"Only payments in this state: waiting, settled, refund_due, refunded, unclear, dismissed, disputed or claimed."`
	Sale  uuid.UUID `env:"STAMPEDE_PAYMENT_SALE" placeholder:"ID" help:"Only payments for orders of this sale."`
	Order orderID   `env:"STAMPEDE_PAYMENT_ORDER" placeholder:"ID" help:"Only payments for this order."`
	Limit int       `default:"50" env:"STAMPEDE_PAYMENT_LIMIT" placeholder:"N" help:"Most payments to list (${default})."`
}

func (c *paymentListCmd) Run(ctx context.Context, s *streams) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	var all []order.PaymentView
	more := false
	err := c.withPayments(ctx, "", func(in payments) (err error) {
		filter := order.PaymentFilter{State: order.PaymentState(c.State), Sale: c.Sale, Order: c.Order.UUID}
		all, more, err = in.Payments(ctx, filter, c.Limit)
		return err
	})
	if err == nil {
		err = writeAll(c.outputFlag, s.out, all, asIs, writePayments)
	}
	if err == nil && more {
		_, err = fmt.Fprintln(s.err, "there are more: raise --limit")
	}
	return err
}

func writePayments(w io.Writer, payments []order.PaymentView) error {
	t := newTable(w, "REFERENCE", "STATE", "REASON", "AMOUNT", "ORDER", "RECEIVED", "CHANGED")
	for _, p := range payments {
		t.row(printable(p.Reference), p.State, orDash(string(p.Reason)), orDash(amount(p.Amount, p.Currency)),
			idOrDash(p.OrderID), p.ReceivedAt, p.UpdatedAt)
	}
	return t.Flush()
}

// amount is a sum in minor units, or "".
func amount(minor int64, currency string) string {
	if minor == 0 {
		return currency
	}
	return strings.TrimSpace(fmt.Sprint(minor, " ", currency))
}

type paymentShowCmd struct {
	readOnly
	postgresOrServer
	outputFlag
	paymentArg
}

func (c *paymentShowCmd) Run(ctx context.Context, s *streams) error {
	return c.withPayments(ctx, "", func(in payments) error {
		v, err := in.Payment(ctx, c.Reference)
		if err != nil {
			return err
		}
		return c.write(s.out, v, func(w io.Writer) error {
			t := newTable(w)
			for _, row := range [][2]string{
				{"payment", printable(v.Reference)},
				{"state", string(v.State)},
				{"reason", string(v.Reason)},
				{"amount", amount(v.Amount, v.Currency)},
				{"order", idOrDash(v.OrderID)},
				{"sale", idOrDash(v.SaleID)},
				{"cannot be read", printable(v.Unreadable)},
				{"received", v.ReceivedAt},
				{"changed", v.UpdatedAt},
				{"refund", printable(v.RefundReference)},
				{"operator", printable(v.Operator)},
				{"note", printable(v.Note)},
				{"dispute", printable(v.Dispute)},
			} {
				if row[1] != "" {
					t.row(row[0], row[1])
				}
			}
			return t.Flush()
		})
	})
}

type paymentRefundedCmd struct {
	postgresOrServer
	outputFlag
	operatorFlag
	paymentArg
	RefundReference string `arg:"" help:"Reference of the refund at the payment provider."`
}

func (c *paymentRefundedCmd) Run(ctx context.Context, s *streams) error {
	if err := order.ValidateRefundReference(c.RefundReference); err != nil {
		return err
	}
	return c.endPayment(ctx, c.operatorFlag, func(in payments) error {
		p, err := in.Refunded(ctx, c.Reference, c.RefundReference)
		if err != nil {
			return err
		}
		return c.print(s.out, p, "payment %s is refunded with %s\n", printable(p.Reference),
			printable(p.RefundReference))
	})
}

type paymentDismissedCmd struct {
	postgresOrServer
	outputFlag
	operatorFlag
	paymentArg
	Reason string `arg:"" help:"Why nothing has to go back."`
}

func (c *paymentDismissedCmd) Run(ctx context.Context, s *streams) error {
	if err := order.ValidateReason(c.Reason); err != nil {
		return err
	}
	return c.endPayment(ctx, c.operatorFlag, func(in payments) error {
		p, err := in.Dismissed(ctx, c.Reference, c.Reason)
		if err != nil {
			return err
		}
		return c.print(s.out, p, "payment %s is dismissed: %s\n", printable(p.Reference), printable(p.Note))
	})
}

// endPayment calls do with the payments, in the name of the operator.
func (f *postgresOrServer) endPayment(ctx context.Context, by operatorFlag, do func(payments) error) error {
	name, err := by.name()
	if err != nil {
		return err
	}
	err = f.withPayments(ctx, name, do)
	if errors.Is(err, apiclient.ErrUnknown) {
		err = fmt.Errorf("%w; it may be repeated", err)
	}
	return err
}
