package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/google/uuid"

	"stampede/internal/figure"
	"stampede/internal/progress"
	"stampede/ledger"
	"stampede/reservation/order"
)

type paymentCmd struct {
	List     paymentListCmd     `cmd:"" help:"List payments, those first whose state changed longest ago. Amounts are in minor units."`
	Show     paymentShowCmd     `cmd:"" help:"Show a payment: its order, and what became of it."`
	Refunded paymentRefundedCmd `cmd:"" help:"Note that a payment whose refund is due was paid back. It moves no money. Repeating it changes nothing."`
	Import   paymentImportCmd   `cmd:"" help:"Report the payments of a file, one JSON object a line, as POST /v1/payments takes them: {order_id, reference, amount, currency}. Repeating it changes nothing. Exit status 1 if a line is no report."`
}

type paymentArg struct {
	Reference string `arg:"" help:"Reference of the payment; of one that its buyer reported, ORDER:REFERENCE."`
}

type paymentListCmd struct {
	look
	databaseFlag
	outputFlag
	State string    `enum:",waiting,settled,refund_due,refunded" default:"" env:"STAMPEDE_PAYMENT_STATE" placeholder:"STATE" help:"Only payments in this state: waiting, settled, refund_due or refunded."`
	Sale  uuid.UUID `env:"STAMPEDE_PAYMENT_SALE" placeholder:"ID" help:"Only payments for orders of this sale."`
	Order orderID   `env:"STAMPEDE_PAYMENT_ORDER" placeholder:"ID" help:"Only payments for this order."`
	Limit int       `default:"50" env:"STAMPEDE_PAYMENT_LIMIT" placeholder:"N" help:"Most payments to list (${default})."`
}

func (c *paymentListCmd) Run(ctx context.Context, s *streams) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	const pageMax = 1000
	var all []order.PaymentView
	next := int64(0)
	err := c.withLedger(ctx, func(l *ledger.Ledger) error {
		filter := order.PaymentFilter{State: order.PaymentState(c.State), Sale: c.Sale, Order: c.Order.UUID}
		for len(all) < c.Limit {
			var page []order.Payment
			var err error
			if page, next, err = l.ListPayments(ctx, filter, next, min(c.Limit-len(all), pageMax)); err != nil {
				return err
			}
			for _, p := range page {
				all = append(all, p.View())
			}
			if next == 0 {
				break
			}
		}
		return nil
	})
	if err == nil {
		err = writeAll(c.outputFlag, s.out, all, asIs, writePayments)
	}
	if err == nil && next != 0 {
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
	look
	databaseFlag
	outputFlag
	paymentArg
}

func (c *paymentShowCmd) Run(ctx context.Context, s *streams) error {
	return c.withLedger(ctx, func(l *ledger.Ledger) error {
		p, err := l.Payment(ctx, c.Reference)
		if err != nil {
			return err
		}
		v := p.View()
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
	databaseFlag
	outputFlag
	operatorFlag
	paymentArg
	RefundReference string `arg:"" help:"Reference of the refund at the payment provider."`
}

func (c *paymentRefundedCmd) Run(ctx context.Context, s *streams) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	return c.withLedger(ctx, func(l *ledger.Ledger) error {
		p, err := l.Refund(ctx, c.Reference, c.RefundReference, name)
		if err != nil {
			return err
		}
		return c.print(s.out, p.View(), "payment %s is refunded with %s\n", printable(p.Reference),
			printable(p.RefundReference))
	})
}

type paymentImportCmd struct {
	databaseFlag
	outputFlag
	File string `arg:"" type:"existingfile" help:"File to read, - for standard input. Lines are taken one after the other: of two payments for an order, the first one settles it."`
}

// imported counts the lines of an import by what became of them.
type imported struct {
	Settled   int64 `json:"settled"`
	RefundDue int64 `json:"refund_due"`
	Waiting   int64 `json:"waiting"`
	Repeated  int64 `json:"repeated"`
	Archived  int64 `json:"archived"`
	Bad       int64 `json:"bad"`
}

func (c *paymentImportCmd) Run(ctx context.Context, s *streams) error {
	file := s.in
	if c.File != "-" {
		var err error
		if file, err = os.Open(c.File); err != nil {
			return usagef("%w", err)
		}
		defer func() { _ = file.Close() }() // it was only read
	}
	var found imported
	err := c.withLedger(ctx, func(l *ledger.Ledger) error {
		ctx, stop := s.watch(ctx, "importing")
		defer stop()
		return found.read(ctx, file, l, s.err)
	})
	if err != nil {
		return err
	}
	if err := c.print(s.out, found, "%s settled, %s due for refund, %s waiting, %s reported before, "+
		"%s of archived sales, %s bad lines\n", figure.Count(found.Settled), figure.Count(found.RefundDue),
		figure.Count(found.Waiting), figure.Count(found.Repeated), figure.Count(found.Archived),
		figure.Count(found.Bad)); err != nil {
		return err
	}
	return verdict(nil, found.Bad > 0, false)
}

// read reports the lines to l, and says on stderr which of them are no reports. Its other errors end it: what was
// reported before is repeated by the next import, which changes nothing.
func (n *imported) read(ctx context.Context, from io.Reader, l *ledger.Ledger, stderr io.Writer) error {
	counts := map[order.PaymentState]*int64{
		order.PaymentSettled: &n.Settled, order.PaymentRefundDue: &n.RefundDue, order.PaymentWaiting: &n.Waiting,
	}
	isNew := false
	l = l.WithPayments(func(state order.PaymentState, _ order.RefundReason) { isNew = true; *counts[state]++ })
	lines := bufio.NewReader(from)
	for number, end := int64(1), error(nil); end == nil; number++ {
		var line []byte
		line, end = lines.ReadBytes('\n')
		if end != nil && !errors.Is(end, io.EOF) {
			return fmt.Errorf("read line %d: %w", number, end)
		}
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		m, err := order.ReadMoney(line)
		if err == nil && m.OrderID != uuid.Nil {
			// A file has the payments of an archived order: they were decided about.
			if _, _, err = l.History(ctx, m.OrderID); !errors.Is(err, order.ErrArchived) {
				err = nil
			}
		}
		if err == nil {
			isNew = false
			_, err = l.Report(ctx, m)
		}
		var invalid *order.InvalidError
		switch {
		case errors.Is(err, order.ErrArchived):
			n.Archived++
		case errors.As(err, &invalid), errors.Is(err, order.ErrDamaged):
			n.Bad++
			_, _ = fmt.Fprintf(stderr, "stampede: line %d: %s\n", number, printable(err.Error()))
		case err != nil:
			return fmt.Errorf("line %d: %w; repeat the import, which is safe", number, err)
		case !isNew:
			n.Repeated++
		}
		progress.At(ctx, number, 0, "lines")
	}
	return nil
}
