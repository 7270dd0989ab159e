package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/google/uuid"

	"stampede/internal/apiclient"
	"stampede/internal/format"
	"stampede/internal/progress"
	"stampede/reservation/order"
)

type paymentImportCmd struct {
	postgresOrServer
	outputFlag
	operatorFlag
	File string `arg:"" type:"existingfile" help:"File to read, - for standard input. Lines are taken one after the other: of two payments for an order, the first one settles it. Refunds may come before their payments, and a payment that was refunded settles no order."`
}

// imported counts the lines of an import by what became of them.
type imported struct {
	Settled   int64 `json:"settled"`
	RefundDue int64 `json:"refund_due"`
	Waiting   int64 `json:"waiting"`
	Unclear   int64 `json:"unclear"`
	Refunded  int64 `json:"refunded"`
	Repeated  int64 `json:"repeated"`
	Bad       int64 `json:"bad"`
}

func (c *paymentImportCmd) Run(ctx context.Context, s *streams) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	file, err := c.open(s.in)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	found := paymentImport{refunds: map[string]*refund{}, stderr: s.err}
	err = c.withPayments(ctx, name, func(in payments) error {
		ctx, stop := s.watch(ctx, "importing")
		defer stop()
		found.to = in
		return found.read(ctx, file)
	})
	if err != nil {
		return err
	}
	n := found.imported
	if err := c.print(s.out, n, "%s settled, %s due for refund, %s waiting, %s unclear, %s refunded, %s reported before, "+
		"%s bad lines\n", format.Count(n.Settled), format.Count(n.RefundDue), format.Count(n.Waiting),
		format.Count(n.Unclear), format.Count(n.Refunded), format.Count(n.Repeated), format.Count(n.Bad)); err != nil {
		return err
	}
	return verdict(nil, n.Bad > 0, false)
}

// open opens the file. Standard input is copied, because the file is read twice.
func (c *paymentImportCmd) open(stdin io.Reader) (file *os.File, err error) {
	if c.File != "-" {
		if file, err = os.Open(c.File); err != nil {
			err = usagef("%w", err)
		}
		return file, err
	}
	if file, err = os.CreateTemp("", "stampede-import-*"); err != nil {
		return nil, err
	}
	err = os.Remove(file.Name()) // it lasts as long as it is open
	if err == nil {
		_, err = io.Copy(file, stdin)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy standard input: %w", err), file.Close())
	}
	return file, nil
}

// refundsMax bounds the refunds of a file, which are held in memory.
const refundsMax = 100_000

// paymentImport takes the payments of a file, and then those that were refunded: their money settles no order.
type paymentImport struct {
	imported
	to      payments
	stderr  io.Writer
	refunds map[string]*refund // by the reference of the payment
	order   []*refund          // in the order of the file
}

// refund is a payment that was refunded.
type refund struct {
	payment importedLine // without a report if no line has its order or its amount
	line    int64        // of the refund
}

// importedLine is a line of the file.
type importedLine struct {
	number int64
	order.Money
	refundReference string
	report          json.RawMessage // nil if the line has nothing but the two references
}

// readPayment reads a line as POST /v1/payments does, and the reference of a refund.
func readPayment(number int64, text []byte) (line importedLine, err error) {
	line.number = number
	if line.Money, err = order.ReadMoney(text); err != nil {
		return line, err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil {
		return line, err
	}
	if raw := members["refund_reference"]; raw != nil && json.Unmarshal(raw, &line.refundReference) != nil {
		return line, &order.InvalidError{Field: "refund_reference", Reason: "must be a text"}
	}
	if line.refundReference != "" {
		if err := order.ValidateRefundReference(line.refundReference); err != nil {
			return line, err
		}
		if line.OrderID == uuid.Nil && line.Amount == 0 && line.Currency == "" && line.Unreadable == "" {
			return line, nil
		}
	}
	maps.DeleteFunc(members, func(name string, _ json.RawMessage) bool {
		return !slices.Contains([]string{"order_id", "reference", "amount", "currency"}, name)
	})
	line.report, err = json.Marshal(members)
	return line, err
}

// read takes the lines of the file, and says on stderr which of them it could not. Its other errors end it: what was
// taken before is repeated by the next import, which changes nothing.
func (n *paymentImport) read(ctx context.Context, file io.ReadSeeker) error {
	if err := n.eachLine(ctx, file, n.hold); err != nil {
		return err
	}
	if err := n.eachLine(ctx, file, n.take); err != nil {
		return err
	}
	for _, r := range n.order {
		if err := n.note(r.line, n.refund(ctx, r)); err != nil {
			return err
		}
	}
	return nil
}

func (n *paymentImport) eachLine(
	ctx context.Context, file io.ReadSeeker, do func(context.Context, importedLine, error) error,
) error {
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("read the file a second time: %w", err)
	}
	lines := bufio.NewReader(file)
	for number, end := int64(1), error(nil); end == nil; number++ {
		var text []byte
		text, end = lines.ReadBytes('\n')
		if end != nil && !errors.Is(end, io.EOF) {
			return fmt.Errorf("read line %d: %w", number, end)
		}
		if len(bytes.TrimSpace(text)) == 0 {
			continue
		}
		line, err := readPayment(number, text)
		if err = do(ctx, line, err); err != nil {
			return err
		}
		progress.At(ctx, number, 0, "lines")
	}
	return nil
}

// hold remembers a refund.
func (n *paymentImport) hold(_ context.Context, line importedLine, err error) error {
	if err != nil || line.refundReference == "" {
		return nil //nolint:nilerr // take names the line
	}
	first, known := n.refunds[line.Reference]
	switch {
	case !known && len(n.order) == refundsMax:
		return usagef("the file has more than %s refunds: split it, so that each part has the refunds of its payments",
			format.Count(refundsMax))
	case !known:
		r := &refund{line, line.number}
		n.refunds[line.Reference] = r
		n.order = append(n.order, r)
	case first.payment.refundReference != line.refundReference:
		n.bad(line.number, fmt.Errorf("the payment %s is refunded with %q here, and with %q in line %d", line.Reference,
			line.refundReference, first.payment.refundReference, first.line))
	default:
		n.Repeated++
	}
	return nil
}

// take reports a payment. One that was refunded waits for the end of the file.
func (n *paymentImport) take(ctx context.Context, line importedLine, err error) error {
	r, isRefunded := n.refunds[line.Reference]
	switch {
	case err != nil:
	case isRefunded && r.payment.report == nil:
		r.payment.Money, r.payment.report = line.Money, line.report
		return nil
	case isRefunded:
		return nil
	default:
		err = n.report(ctx, line)
	}
	return n.note(line.number, err)
}

// note names a bad line, and returns every other error.
func (n *paymentImport) note(line int64, err error) error {
	var invalid *order.InvalidError
	switch {
	case err == nil:
	case errors.As(err, &invalid), errors.Is(err, errBadLine), errors.Is(err, apiclient.ErrInvalid),
		errors.Is(err, order.ErrDamaged), errors.Is(err, order.ErrRefundNotDue), errors.Is(err, order.ErrArchived):
		n.bad(line, err)
	default:
		return fmt.Errorf("line %d: %w; repeat the import, which is safe", line, err)
	}
	return nil
}

func (n *paymentImport) bad(line int64, err error) {
	n.Bad++
	_, _ = fmt.Fprintf(n.stderr, "stampede: line %d: %s\n", line, printable(err.Error()))
}

// errBadLine is wrapped by the errors of lines that could not be taken. The others are taken.
var errBadLine = errors.New("not imported")

// report reports a payment that was not refunded.
func (n *paymentImport) report(ctx context.Context, line importedLine) error {
	before := map[string]order.PaymentState{}
	for _, reference := range []string{line.Reference, line.KeyOfContradiction()} {
		p, err := n.find(ctx, reference)
		if err != nil {
			return err
		}
		if before[reference] = p.State; p.State == "" {
			break // there is nothing to contradict
		}
	}
	p, err := n.to.Report(ctx, line.report)
	if err != nil {
		return err
	}
	counts := map[order.PaymentState]*int64{
		order.PaymentSettled: &n.Settled, order.PaymentRefundDue: &n.RefundDue, order.PaymentWaiting: &n.Waiting,
		order.PaymentUnclear: &n.Unclear,
	}
	was := before[p.Reference]
	isNew := was == "" || was != order.PaymentWaiting && was != p.State // or mended: it could not be read before
	if count := counts[p.State]; isNew && count != nil {
		*count++
	} else {
		n.Repeated++
	}
	return nil
}

// find returns the payment with this reference, or none.
func (n *paymentImport) find(ctx context.Context, reference string) (order.PaymentView, error) {
	p, err := n.to.Payment(ctx, reference)
	if errors.Is(err, order.ErrPaymentNotFound) {
		return order.PaymentView{}, nil
	}
	return p, err
}

// refund notes that a payment was refunded. It reports one that nobody has reported, unless it may settle its order.
func (n *paymentImport) refund(ctx context.Context, r *refund) error {
	reference, refundReference := r.payment.Reference, r.payment.refundReference
	p, err := n.find(ctx, reference)
	if err == nil && p.State == "" {
		if err := n.mayReport(ctx, r.payment); err != nil {
			return err
		}
		p, err = n.to.Report(ctx, r.payment.report)
	}
	if err != nil {
		return err
	}
	switch p.State {
	case order.PaymentRefunded:
		if p.RefundReference != refundReference {
			return &order.RefundedError{RefundReference: p.RefundReference}
		}
		n.Repeated++
		return nil
	case order.PaymentRefundDue, order.PaymentUnclear:
		if _, err = n.to.Refunded(ctx, p.Reference, refundReference); err == nil {
			n.Refunded++
		}
		return err
	case order.PaymentWaiting:
		return fmt.Errorf("%w: the payment %s waits for its order %s, and no refund is due yet: repeat the import in some "+
			"minutes", errBadLine, reference, p.OrderID)
	case order.PaymentSettled:
		return fmt.Errorf("%w: no refund of the payment %s is due: it is %s, for the order %s; `stampede order cancel` makes "+
			"it due: then repeat the import", errBadLine, reference, p.State, p.OrderID)
	default:
		return fmt.Errorf("%w: no refund of the payment %s is due: it is %s", errBadLine, reference, p.State)
	}
}

// mayReport returns an error for a payment that may settle its order, though its money was refunded.
func (n *paymentImport) mayReport(ctx context.Context, m importedLine) error {
	if m.report == nil {
		return fmt.Errorf("%w: nobody has reported the payment %s: add a line with its order_id", errBadLine, m.Reference)
	}
	if m.OrderID == uuid.Nil {
		return nil
	}
	o, err := n.to.Order(ctx, m.OrderID, "")
	switch {
	case errors.Is(err, order.ErrNotFound), errors.Is(err, order.ErrArchived):
		return nil
	case err != nil:
		return err
	case o.Status == order.StatusConfirmed && (o.Amount == 0 || o.Amount == m.Amount && o.Currency == m.Currency):
		return fmt.Errorf("%w: the payment %s was refunded, and would settle the order %s: cancel the order, or wait for its "+
			"end, and repeat the import", errBadLine, m.Reference, m.OrderID)
	}
	return nil
}
