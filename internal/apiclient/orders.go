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

// Order returns an order with its events. If it is reserved and not in Postgres yet, it is found by its user only; ""
// is none.
func (c *Client) Order(ctx context.Context, id uuid.UUID, user string) (o order.HistoryView, err error) {
	query := url.Values{}
	if user != "" {
		query.Set("user", user)
	}
	err = c.do(ctx, call{
		method: http.MethodGet, path: []string{"v1", "admin", "orders", id.String()}, query: query,
		what: "show order " + id.String(),
	}, &o)
	return o, err
}

// Orders returns at most limit orders of a user or a sale, newest first.
func (c *Client) Orders(ctx context.Context, filter order.Filter, limit int) (all []order.PlacedView, err error) {
	query := url.Values{}
	if filter.User != "" {
		query.Set("user", filter.User)
	}
	if filter.Sale != uuid.Nil {
		query.Set("sale", filter.Sale.String())
	}
	if filter.Status != "" {
		query.Set("status", string(filter.Status))
	}
	for {
		var page struct {
			Orders     []order.PlacedView `json:"orders"`
			NextCursor string             `json:"next_cursor"`
		}
		query.Set("limit", strconv.Itoa(min(limit-len(all), pageMax)))
		get := call{method: http.MethodGet, path: []string{"v1", "admin", "orders"}, query: query, what: "list orders"}
		if err := c.do(ctx, get, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Orders...)
		if page.NextCursor == "" || len(all) >= limit {
			return all, nil
		}
		query.Set("cursor", page.NextCursor)
	}
}

// CancelOrder cancels an order, also a paid one. It may be repeated.
func (c *Client) CancelOrder(ctx context.Context, id uuid.UUID, reason string) (o order.PlacedView, err error) {
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "admin", "orders", id.String(), "cancel"},
		body: map[string]string{"reason": reason}, what: "cancel order " + id.String(),
	}, &o)
	return o, err
}

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
