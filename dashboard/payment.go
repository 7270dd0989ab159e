package dashboard

import (
	"context"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/session"
	"stampede/internal/format"
	"stampede/ledger"
	"stampede/reservation/order"
)

const (
	paymentsOnPage = 50
	// paymentsInFile bounds the payments of a CSV file, which are read by so many.
	paymentsInFile, paymentsRead = 10_000, 1000
)

// paymentsShown are payments, in the order of their latest events.
type paymentsShown struct {
	// Of is the order whose payments they are; zero in a list of the page of refunds, which are all in the state.
	Of       uuid.UUID
	State    order.PaymentState
	Payments []ledger.OpenPayment
	// First has, by their references, the payments that unclear ones contradict.
	First map[string]order.Payment
	// Filter is that of the page of refunds, and More the URL of its next page, if there is one.
	Filter refundFilter
	More   string
	// Rest is true if an order has more payments than are shown.
	Rest bool
}

// Endable is how many of the payments an operator can end.
func (p paymentsShown) Endable() (n int) {
	for i := range p.Payments {
		if isEndable(p.Payments[i].State) {
			n++
		}
	}
	return n
}

func isEndable(s order.PaymentState) bool {
	return s == order.PaymentRefundDue || s == order.PaymentUnclear
}

// addFirst reads the payments that unclear ones contradict.
func (d orderPages) addFirst(ctx context.Context, p *paymentsShown) (err error) {
	var first []string
	for i := range p.Payments {
		if contradicted := p.Payments[i].Contradicted(); contradicted != "" {
			first = append(first, contradicted)
		}
	}
	if len(first) > 0 {
		p.First, err = d.ledger.Payments(ctx, first)
	}
	return err
}

// paymentsOf are the payments of an order.
func (d orderPages) paymentsOf(ctx context.Context, id uuid.UUID) (p paymentsShown, err error) {
	p.Of = id
	found, next, err := d.ledger.ListPayments(ctx, order.PaymentFilter{Order: id}, 0, paymentsOnPage)
	if err != nil {
		return p, err
	}
	for _, payment := range found {
		p.Payments = append(p.Payments, ledger.OpenPayment{Payment: payment})
	}
	p.Rest = next != 0
	return p, d.addFirst(ctx, &p)
}

// refundStates are the states of the payments that people have to do something about, in the order of the page.
var refundStates = []order.PaymentState{order.PaymentUnclear, order.PaymentDisputed, order.PaymentRefundDue}

// refundFilter is what the page of refunds shows. Its URL has it. Zero members select all.
type refundFilter struct {
	Sale     string
	Reason   order.PaymentReason
	Currency string
	// Hours is how long they are in their state at least.
	Hours int64
	// State is that of the only list, and After the position after which that begins.
	State order.PaymentState
	After int64
}

func readRefundFilter(q url.Values) (f refundFilter, err error) {
	f = refundFilter{
		Sale: field(q, "sale"), Reason: order.PaymentReason(q.Get("reason")), State: order.PaymentState(q.Get("state")),
		Currency: strings.ToUpper(field(q, "currency")),
	}
	f.Hours, _ = strconv.ParseInt(q.Get("hours"), 10, 64) // without a number, of any age
	f.Hours = min(max(f.Hours, 0), 1e5)
	f.After, _ = strconv.ParseInt(q.Get("after"), 10, 64) // without one, the first page
	if !slices.Contains(refundStates, f.State) {
		f.State = ""
		if f.After != 0 {
			f.State = order.PaymentRefundDue
		}
	}
	id, notID := uuid.Parse(f.Sale)
	switch {
	case f.Sale != "" && (notID != nil || id == uuid.Nil):
		err = errNoSaleID
	case f.Reason != "" && !slices.Contains(dueReasons(), f.Reason):
		err = &refusal{"There is no such reason.", ""}
	case f.Currency != "" && !order.IsCurrency(f.Currency):
		err = &refusal{"That is not a currency.", "It is like EUR."}
	}
	return f, err
}

// dueReasons are those that a payment on the page of refunds may have.
func dueReasons() []order.PaymentReason {
	return append(order.RefundReasons(), order.UnclearReasons()...)
}

// Query is the filter as the URL has it.
func (f refundFilter) Query() string {
	q := url.Values{}
	for name, value := range map[string]string{
		"sale": f.Sale, "reason": string(f.Reason), "currency": f.Currency, "state": string(f.State),
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	for name, n := range map[string]int64{"hours": f.Hours, "after": f.After} {
		if n != 0 {
			q.Set(name, strconv.FormatInt(n, 10))
		}
	}
	return q.Encode()
}

// URL is that of the page, or of the file.
func (f refundFilter) URL(path string) string { return strings.TrimSuffix(path+"?"+f.Query(), "?") }

// IsNarrow is true if something is selected.
func (f refundFilter) IsNarrow() bool {
	return f.Sale != "" || f.Reason != "" || f.Currency != "" || f.Hours > 0 || f.After != 0
}

// Reasons and Ages are what can be chosen.
func (refundFilter) Reasons() []order.PaymentReason { return dueReasons() }
func (refundFilter) Ages() []int64                  { return []int64{1, 6, 24, 72, 168, 720} }

// states are those of the lists that the filter selects.
func (f refundFilter) states() []order.PaymentState {
	if f.State != "" {
		return []order.PaymentState{f.State}
	}
	return refundStates
}

// list reads at most limit payments of one list.
func (f refundFilter) list(
	ctx context.Context, l *ledger.Ledger, state order.PaymentState, after int64, limit int,
) ([]ledger.OpenPayment, int64, error) {
	open := ledger.OpenFilter{State: state, Reason: f.Reason, Currency: f.Currency}
	open.Sale, _ = uuid.Parse(f.Sale) // readRefundFilter has checked it
	if f.Hours > 0 {
		open.Until = time.Now().Add(-time.Duration(f.Hours) * time.Hour)
	}
	return l.OpenPayments(ctx, open, after, limit)
}

// refundsPage is the body of the lists of payments that people have to do something about, the oldest first.
type refundsPage struct {
	refundFilter
	// Due are all refunds that are due, by currency.
	Due []ledger.RefundsDue
	// Lists has one of each state that is asked for; without payments only that of refunds that are due.
	Lists         []paymentsShown
	Max           int
	Problem, Hint string
}

func (d orderPages) refunds(ctx context.Context, r *http.Request) (page, error) {
	p := page{template: "refunds", title: "Refunds"}
	filter, wrong := readRefundFilter(r.URL.Query())
	body := refundsPage{refundFilter: filter, Max: paymentsInFile}
	var err error
	if body.Due, err = d.ledger.RefundsDue(ctx); err != nil {
		return p, err
	}
	if wrong != nil {
		body.Problem, body.Hint, p.status = explain(wrong)
		p.body = body
		return p, nil
	}
	for _, state := range filter.states() {
		list := paymentsShown{State: state, Filter: filter}
		var next int64
		if list.Payments, next, err = filter.list(ctx, d.ledger, state, filter.After, paymentsOnPage); err != nil {
			return p, err
		}
		if next != 0 {
			more := filter
			more.State, more.After = state, next
			list.More = more.URL("/refunds")
		}
		if err := d.addFirst(ctx, &list); err != nil {
			return p, err
		}
		if len(list.Payments) > 0 || next != 0 || state == order.PaymentRefundDue || filter.State != "" {
			body.Lists = append(body.Lists, list)
		}
	}
	p.body = body
	return p, nil
}

// refundsFile answers with what the page of refunds shows, and what follows, as CSV.
func (d orderPages) refundsFile(w http.ResponseWriter, r *http.Request, s *session.Session) {
	ctx, cancel := context.WithTimeout(r.Context(), bulkTimeout)
	defer cancel()
	filter, err := readRefundFilter(r.URL.Query())
	var found []ledger.OpenPayment
	more := false
	for _, state := range filter.states() {
		for after, isFirst := filter.After, true; err == nil && (isFirst || after != 0); isFirst = false {
			if more = len(found) == paymentsInFile; more {
				break
			}
			var next []ledger.OpenPayment
			limit := min(paymentsRead, paymentsInFile-len(found))
			next, after, err = filter.list(ctx, d.ledger, state, after, limit)
			found = append(found, next...)
		}
	}
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	file := newFile(w, "refunds", "payment", "state", "reason", "late_seconds", "amount", "currency", "since", "received",
		"order", "sale", "sale_name", "unreadable")
	for i := range found {
		p := &found[i]
		amount, late := "", ""
		if p.Amount > 0 {
			amount = strconv.FormatInt(p.Amount, 10)
		}
		if p.Late > 0 {
			late = strconv.FormatInt(int64(p.Late/time.Second), 10)
		}
		file.row(p.Reference, string(p.State), string(p.Reason), late, amount, p.Currency,
			p.UpdatedAt.UTC().Format(instant), p.ReceivedAt.UTC().Format(instant), idText(p.OrderID), idText(p.SaleID),
			p.SaleName, p.Unreadable)
	}
	if more {
		file.row("There may be more: this file has the first " + count(paymentsInFile) + ".")
	}
	file.Flush()
}

// pageOfPayments is the page that had the form for payments.
func pageOfPayments(form url.Values) string {
	if id, err := uuid.Parse(form.Get("order")); err == nil {
		return "/orders/" + id.String()
	}
	q, _ := url.ParseQuery(form.Get("back")) // what is damaged selects nothing
	f, err := readRefundFilter(q)
	if err != nil {
		return "/refunds"
	}
	return f.URL("/refunds")
}

// refund notes that payments were refunded, as stampede payment refunded does.
func (d orderPages) refund(ctx context.Context, r *http.Request, operator string) (action, error) {
	refund := field(r.PostForm, "refund")
	ending := ending{
		"refunded", order.ValidateRefundReference(refund), sumsOf,
		func(payment string) (order.Payment, error) { return d.ledger.Refund(ctx, payment, refund, operator) },
	}
	return ending.of(r.PostForm), nil
}

// dismiss notes that nothing of unclear payments has to go back, as stampede payment dismissed does.
func (d orderPages) dismiss(ctx context.Context, r *http.Request, operator string) (action, error) {
	why := field(r.PostForm, "reason")
	invalid := order.ValidateReason(why)
	if why == "" {
		invalid = &refusal{"Say why nothing has to go back.", "Nothing was done. The reason is recorded with it."}
	}
	ending := ending{
		"dismissed", invalid, func([]order.Payment) string { return ": nothing has to go back" },
		func(payment string) (order.Payment, error) { return d.ledger.Dismiss(ctx, payment, why, operator) },
	}
	return ending.of(r.PostForm), nil
}

// ending is what operators do to payments that are due or unclear.
type ending struct {
	name string
	// invalid is what is wrong with the form, if anything is.
	invalid error
	// says is what to say of those that are ended.
	says func([]order.Payment) string
	end  func(payment string) (order.Payment, error)
}

// of ends the payments that are selected. Each is an action of its own: one that fails does not stop the others.
func (e ending) of(form url.Values) action {
	references := slices.Compact(slices.Sorted(slices.Values(form["payment"])))
	return action{e.name, []any{"payment", strings.Join(references, ",")}, pageOfPayments(form), func() (string, error) {
		switch {
		case len(references) == 0:
			return "", &refusal{"No payment is selected.", "Nothing was done. Select some."}
		case len(references) > bulkMax:
			return "", &refusal{
				"Too many payments are selected.", "Nothing was done. Select at most " + count(bulkMax) + ".",
			}
		case e.invalid != nil:
			return "", e.invalid
		}
		var done []order.Payment
		said := func(n int) string {
			if n == 1 {
				return "The payment " + format.Printable(done[0].Reference) + " is " + e.name + e.says(done) + "."
			}
			return count(n) + " payments are " + e.name + e.says(done) + "."
		}
		return each(references, said, func(reference string) error {
			p, err := e.end(reference)
			if err == nil {
				done = append(done, p)
			}
			return err
		})
	}}
}

// sumsOf are the sums of payments, by currency.
func sumsOf(payments []order.Payment) string {
	sums := map[string]int64{}
	for i := range payments {
		p := &payments[i]
		if sum := sums[p.Currency]; p.Amount > 0 && sum <= math.MaxInt64-p.Amount {
			sums[p.Currency] += p.Amount
		}
	}
	var texts []string
	for _, currency := range slices.Sorted(maps.Keys(sums)) {
		texts = append(texts, format.Money(sums[currency], currency))
	}
	if texts == nil {
		return ""
	}
	return ": " + strings.Join(texts, ", ")
}
