package apiclient

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Payment returns the payment with a reference, or order.ErrPaymentNotFound.
func (c *Client) Payment(ctx context.Context, reference string) (order.PaymentView, error) {
	page, err := c.payments(ctx, url.Values{"reference": {reference}}, "show payment "+reference)
	if err == nil && len(page.Payments) == 0 {
		err = order.ErrPaymentNotFound
	}
	if err != nil {
		return order.PaymentView{}, err
	}
	return page.Payments[0], nil
}

// Payments returns at most limit payments, those first whose state changed longest ago, and whether there are more.
func (c *Client) Payments(
	ctx context.Context, filter order.PaymentFilter, limit int,
) (all []order.PaymentView, more bool, err error) {
	query := url.Values{}
	if filter.State != "" {
		query.Set("state", string(filter.State))
	}
	if filter.Sale != uuid.Nil {
		query.Set("sale", filter.Sale.String())
	}
	if filter.Order != uuid.Nil {
		query.Set("order", filter.Order.String())
	}
	for {
		query.Set("limit", strconv.Itoa(min(limit-len(all), pageMax)))
		page, err := c.payments(ctx, query, "list payments")
		if err != nil {
			return nil, false, err
		}
		all, more = append(all, page.Payments...), page.NextCursor != ""
		if !more || len(all) >= limit {
			return all, more, nil
		}
		query.Set("cursor", page.NextCursor)
	}
}

type paymentPage struct {
	Payments   []order.PaymentView `json:"payments"`
	NextCursor string              `json:"next_cursor"`
}

func (c *Client) payments(ctx context.Context, query url.Values, what string) (page paymentPage, err error) {
	err = c.do(ctx, call{
		method: http.MethodGet, path: []string{"v1", "admin", "payments"}, query: query, what: what,
	}, &page)
	return page, err
}

// Report reports money, as POST /v1/payments takes it, and returns what became of it. It may be repeated.
func (c *Client) Report(ctx context.Context, report json.RawMessage) (p order.PaymentView, err error) {
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "payments"}, body: report, what: "report a payment",
	}, &p)
	return p, err
}

// Refunded notes that a payment whose refund is due was refunded. It may be repeated.
func (c *Client) Refunded(ctx context.Context, reference, refundReference string) (order.PaymentView, error) {
	return c.endPayment(ctx, reference, "refunded", map[string]string{"refund_reference": refundReference})
}

// Dismissed notes that nothing of an unclear payment has to go back. It may be repeated.
func (c *Client) Dismissed(ctx context.Context, reference, reason string) (order.PaymentView, error) {
	return c.endPayment(ctx, reference, "dismissed", map[string]string{"reason": reason})
}

func (c *Client) endPayment(
	ctx context.Context, reference, how string, body map[string]string,
) (p order.PaymentView, err error) {
	escaped := strings.ReplaceAll(url.PathEscape(reference), ".", "%2E") // "." and ".." are other paths
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "admin", "payments", escaped, how}, body: body,
		what: "note that payment " + reference + " is " + how,
	}, &p)
	return p, err
}
