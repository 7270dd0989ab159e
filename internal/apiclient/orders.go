package apiclient

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

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
