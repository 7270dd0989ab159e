package apiclient

import (
	"bytes"
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/catalog"
)

// pageMax is the longest page of an ingress.
const pageMax = 100

// CreateOnce creates a sale, or returns the one that was created with the key before.
func (c *Client) CreateOnce(
	ctx context.Context, t reservation.Terms, key string,
) (sale catalog.CountedSale, replayed bool, err error) {
	if err := t.Validate(); err != nil { // seconds would hide a fraction
		return sale, false, err
	}
	body := struct {
		reservation.TermsView
		Items    []reservation.Item `json:"items,omitempty"`
		OpensAt  time.Time          `json:"opens_at,omitzero"` // of any precision
		ClosesAt time.Time          `json:"closes_at,omitzero"`
	}{t.View(), t.Items, t.OpensAt, t.ClosesAt}
	if len(t.Items) > 0 {
		body.Stock = 0 // items have theirs
	}
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "sales"}, key: key, what: "create a sale", body: body,
	}, &sale)
	return sale, false, err
}

// Show returns a sale with the count of its units, a second old at most.
func (c *Client) Show(ctx context.Context, id uuid.UUID) (sale catalog.CountedSale, err error) {
	err = c.do(ctx, call{
		method: http.MethodGet, path: []string{"v1", "sales", id.String()}, what: "show sale " + id.String(),
	}, &sale)
	return sale, err
}

// List returns at most limit sales, newest first, and only those older than after unless that is uuid.Nil.
func (c *Client) List(ctx context.Context, after uuid.UUID, limit int) (sales []catalog.CountedSale, err error) {
	cursor := ""
	if after != uuid.Nil {
		cursor = base64.RawURLEncoding.EncodeToString(after[:]) // as an ingress makes them
	}
	for {
		var page struct {
			Sales      []catalog.CountedSale `json:"sales"`
			NextCursor string                `json:"next_cursor"`
		}
		query := url.Values{"limit": {strconv.Itoa(min(limit-len(sales), pageMax))}, "cursor": {cursor}}
		list := call{method: http.MethodGet, path: []string{"v1", "sales"}, query: query, what: "list the sales"}
		if err := c.do(ctx, list, &page); err != nil {
			return nil, err
		}
		sales = append(sales, page.Sales...)
		if cursor = page.NextCursor; cursor == "" || len(sales) >= limit {
			return sales, nil
		}
	}
}

// Pause halts a sale. Like Resume and End it may be repeated.
func (c *Client) Pause(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error) {
	return c.change(ctx, id, "pause")
}

// Resume opens a paused sale again.
func (c *Client) Resume(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error) {
	return c.change(ctx, id, "resume")
}

// End ends a sale permanently.
func (c *Client) End(ctx context.Context, id uuid.UUID) (catalog.CountedSale, error) {
	return c.change(ctx, id, "end")
}

func (c *Client) change(ctx context.Context, id uuid.UUID, action string) (sale catalog.CountedSale, err error) {
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "sales", id.String(), action}, what: action + " sale " + id.String(),
	}, &sale)
	return sale, err
}

// Restock adds units, or removes some if the number is below zero, once for a key.
func (c *Client) Restock(
	ctx context.Context, id uuid.UUID, units int64, key string,
) (sale catalog.CountedSale, err error) {
	return c.restock(ctx, id, map[string]int64{"units": units}, key)
}

// RestockItems is Restock of items, by their codes.
func (c *Client) RestockItems(
	ctx context.Context, id uuid.UUID, units map[string]int64, key string,
) (sale catalog.CountedSale, err error) {
	return c.restock(ctx, id, map[string]map[string]int64{"items": units}, key)
}

func (c *Client) restock(
	ctx context.Context, id uuid.UUID, body any, key string,
) (sale catalog.CountedSale, err error) {
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "sales", id.String(), "restock"}, key: key,
		body: body, what: "restock sale " + id.String(),
	}, &sale)
	return sale, err
}

// Rename changes the names of a sale and of its items. A repeat changes nothing.
func (c *Client) Rename(ctx context.Context, id uuid.UUID, to catalog.Names) (sale catalog.CountedSale, err error) {
	err = c.do(ctx, call{
		method: http.MethodPost, path: []string{"v1", "sales", id.String(), "rename"},
		body: to, what: "rename sale " + id.String(),
	}, &sale)
	return sale, err
}

// historyMax is the most changes that an ingress returns.
const historyMax = 1000

// History returns the newest changes of a sale, at most limit and historyMax, oldest first.
func (c *Client) History(ctx context.Context, id uuid.UUID, limit int) ([]catalog.Change, error) {
	var answer struct {
		Changes []catalog.ChangeView `json:"changes"`
	}
	err := c.do(ctx, call{
		method: http.MethodGet, path: []string{"v1", "admin", "sales", id.String(), "history"},
		query: url.Values{"limit": {strconv.Itoa(min(limit, historyMax))}}, what: "history of sale " + id.String(),
	}, &answer)
	if err != nil {
		return nil, err
	}
	changes := make([]catalog.Change, len(answer.Changes))
	for i, v := range answer.Changes {
		at, err := time.Parse(time.RFC3339, v.OccurredAt)
		if err != nil {
			return nil, err
		}
		changes[i] = catalog.Change{
			Revision: v.Revision, Type: "Sale" + v.Change, OccurredAt: at, Operator: v.Operator, Data: bytes.Clone(v.Data),
		}
	}
	return changes, nil
}
