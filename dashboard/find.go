package dashboard

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	// hitsMax bounds what is found of each kind, and queryMax the text in bytes.
	hitsMax  = 10
	queryMax = 1024
)

// findPage is the body of the page of what the box at the top of each page finds.
type findPage struct {
	Query    string
	Sales    []catalog.FoundSale
	Payments []order.Payment
	Orders   []order.Placed
	// MoreSales and MoreOrders are the URLs of all, if there are more; more payments are not listed.
	MoreSales, MoreOrders string
	MorePayments          bool
}

// search finds an order or a sale by its id, and leads there; else payments by the beginning of their reference, orders
// by the beginning of their user, and sales by a part of their name.
func (d orderPages) search(ctx context.Context, r *http.Request) (page, error) {
	body := findPage{Query: field(r.URL.Query(), "q")}
	p := page{template: "find", title: "Found"}
	isText := utf8.ValidString(body.Query) && !strings.ContainsRune(body.Query, 0)
	if body.Query == "" || len(body.Query) > queryMax || !isText {
		p.body = body
		return p, nil
	}
	id, notID := uuid.Parse(body.Query)
	to, isArchived := "", false
	if notID == nil {
		var err error
		if to, isArchived, err = d.pageOfID(ctx, id); err != nil || to != "" && !isArchived {
			return page{moved: to}, err
		}
	}
	err := d.findText(ctx, &body)
	if body.IsEmpty() && isArchived {
		return page{moved: to}, err
	}
	p.body = body
	return p, err
}

// IsEmpty is true if nothing was found.
func (p findPage) IsEmpty() bool { return len(p.Sales)+len(p.Payments)+len(p.Orders) == 0 }

// pageOfID is the page of the sale or the order with this id, "" if there is none. An order that may be in the archive
// of its sale may also be none: archives are not searched.
func (d orderPages) pageOfID(ctx context.Context, id uuid.UUID) (to string, isArchived bool, err error) {
	switch _, err := d.Catalog.History(ctx, id, 1); {
	case err == nil:
		return "/sales/" + id.String(), false, nil
	case !errors.Is(err, reservation.ErrSaleNotFound):
		return "", false, err
	}
	_, _, err = d.ledger.History(ctx, id)
	isArchived = errors.Is(err, order.ErrArchived)
	switch {
	case err == nil, isArchived:
		return "/orders/" + id.String(), isArchived, nil
	case errors.Is(err, order.ErrNotFound):
		return "", false, nil
	}
	return "", false, err
}

// findText looks for a text.
func (d orderPages) findText(ctx context.Context, p *findPage) (err error) {
	if p.Payments, err = d.ledger.SearchPayments(ctx, p.Query, hitsMax+1); err != nil {
		return err
	}
	if p.MorePayments = len(p.Payments) > hitsMax; p.MorePayments {
		p.Payments = p.Payments[:hitsMax]
	}
	if order.ValidateUser(p.Query) == nil {
		var next order.Order
		filter := order.Filter{User: p.Query}
		if p.Orders, next, err = d.ledger.ListByPrefix(ctx, filter, order.Order{}, hitsMax); err != nil {
			return err
		}
		if next.ID != uuid.Nil {
			p.MoreOrders = "/orders?" + url.Values{"user": {p.Query}, "begins": {"1"}}.Encode()
		}
	}
	var next uuid.UUID
	if p.Sales, next, err = d.Catalog.Search(ctx, catalog.SaleFilter{Name: p.Query}, uuid.Nil, hitsMax); err != nil {
		return err
	}
	if next != uuid.Nil {
		p.MoreSales = "/sales?" + url.Values{"name": {p.Query}}.Encode()
	}
	return nil
}
