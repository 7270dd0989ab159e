package dashboard

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/google/uuid"

	"stampede/internal/figure"
	"stampede/ledger"
	"stampede/reservation/order"
)

const paymentsOnPage = 50

// paymentsShown are payments, in the order of their latest events.
type paymentsShown struct {
	Payments []order.Payment
	// Names are those of the sales that the fleet follows.
	Names map[uuid.UUID]string
	// Of is the order of the page that shows them, or zero.
	Of uuid.UUID
	// More is the URL of the next page, if there is one.
	More string
}

func (d orderPages) payments(
	ctx context.Context, filter order.PaymentFilter, after int64,
) (p paymentsShown, err error) {
	p = paymentsShown{Names: make(map[uuid.UUID]string), Of: filter.Order}
	for _, sale := range d.Fleet.Snapshot().Sales {
		p.Names[sale.ID] = sale.Name
	}
	var next int64
	p.Payments, next, err = d.ledger.ListPayments(ctx, filter, after, paymentsOnPage)
	if next != 0 {
		p.More = refundsURL(filter.Sale.String(), next)
	}
	return p, err
}

// refundsURL is the page of refunds of a sale, or of all, after a position.
func refundsURL(sale string, after int64) string {
	q := url.Values{}
	if id, err := uuid.Parse(sale); err == nil && id != uuid.Nil {
		q.Set("sale", id.String())
	}
	if after != 0 {
		q.Set("after", strconv.FormatInt(after, 10))
	}
	return "/refunds?" + q.Encode()
}

// refundsPage is the body of the list of refunds that are due, the oldest first.
type refundsPage struct {
	Sale  string
	After int64
	// Due are all of them, by currency.
	Due []ledger.RefundsDue
	paymentsShown
	Problem, Hint string
}

func (d orderPages) refunds(ctx context.Context, r *http.Request) (page, error) {
	q := r.URL.Query()
	body := refundsPage{Sale: field(q, "sale")}
	body.After, _ = strconv.ParseInt(q.Get("after"), 10, 64) // without one, the first page
	p := page{template: "refunds", title: "Refunds"}
	var err error
	if body.Due, err = d.ledger.RefundsDue(ctx); err != nil {
		return p, err
	}
	filter := order.PaymentFilter{State: order.PaymentRefundDue}
	if body.Sale != "" {
		if filter.Sale, _ = uuid.Parse(body.Sale); filter.Sale == uuid.Nil {
			body.Problem, body.Hint, p.status = explain(errNoSaleID)
			p.body = body
			return p, nil
		}
	}
	body.paymentsShown, err = d.payments(ctx, filter, body.After)
	p.body = body
	return p, err
}

// refund notes that a payment was refunded, as stampede payment refunded does.
func (d orderPages) refund(ctx context.Context, r *http.Request, operator string) (action, error) {
	form := r.PostForm
	reference := form.Get("payment")
	after, _ := strconv.ParseInt(form.Get("after"), 10, 64)
	to := refundsURL(form.Get("sale"), after)
	if id, err := uuid.Parse(form.Get("order")); err == nil {
		to = "/orders/" + id.String()
	}
	return action{"refunded", []any{"payment", reference}, to, func() (string, error) {
		p, err := d.ledger.Refund(ctx, reference, field(form, "refund"), operator)
		if err != nil {
			return "", err
		}
		text := "The payment " + figure.Printable(p.Reference) + " is refunded"
		if p.Amount > 0 {
			text += ": " + figure.Money(p.Amount, p.Currency)
		}
		return text + ".", nil
	}}, nil
}
