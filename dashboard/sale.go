package dashboard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/internal/format"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	historyMax  = 200
	salesOnPage = 50
)

// salePage is the body of the page of a sale.
type salePage struct {
	fleet.Sale
	// Watched is false for a sale beyond those that the fleet follows: its figures are read for the request.
	Watched  bool
	Rebuilds []fleet.Rebuild
	History  []change
	// HistoryProblem is set if the history cannot be read.
	HistoryProblem string
	Table          table
	// Draw is nil for a sale that is in none.
	Draw *drawLink
	// Key makes a second sending of the form the same restock.
	Key string
}

// change is a row of the history.
type change struct {
	catalog.Change
	Details []detail
}

// detail is a member of the data of an event. Title is shown on hover.
type detail struct{ Name, Value, Title string }

// details returns the members of a JSON object, in the order of their names.
func details(data []byte) (found []detail) {
	var members map[string]json.RawMessage
	if json.Unmarshal(data, &members) != nil {
		return []detail{{Name: "data", Value: format.Printable(string(data))}}
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		value := string(members[name])
		var (
			text  string
			items []reservation.Item
		)
		switch {
		case json.Unmarshal(members[name], &text) == nil:
			value = text
		case name == "items" && members["item_names"] != nil:
			continue // their stock has not changed
		case name == "item_units" || name == "item_taken":
			value = order.Items(value).Text()
		case name == "items" && json.Unmarshal(members[name], &items) == nil:
			value = stocksText(items)
		}
		found = append(found, detail{Name: strings.ReplaceAll(name, "_", " "), Value: format.Printable(value)})
	}
	return found
}

func saleID(r *http.Request) (uuid.UUID, error) {
	id, err := uuid.Parse(r.PathValue("sale"))
	if err != nil {
		return uuid.Nil, reservation.ErrSaleNotFound
	}
	return id, nil
}

// salePages are the pages of sales, and the actions on them.
type salePages struct{ *site }

func (d salePages) show(ctx context.Context, r *http.Request) (page, error) {
	id, err := saleID(r)
	if err != nil {
		return page{}, err
	}
	snapshot := d.Fleet.Snapshot()
	p := salePage{Key: uuid.NewString(), Table: newTable(d.Fleet.History(), id.String())}
	for _, sale := range snapshot.Sales {
		if sale.ID == id {
			p.Sale, p.Watched = sale, true
		}
	}
	if !p.Watched {
		counted, err := d.Catalog.Show(ctx, id)
		if err != nil {
			return page{}, err
		}
		p.Sale = countedSale(counted)
	}
	for _, rebuild := range snapshot.Rebuilds {
		if rebuild.Sale == id || rebuild.Sale == uuid.Nil {
			p.Rebuilds = append(p.Rebuilds, rebuild)
		}
	}
	if p.Draw, err = d.drawOf(ctx, id); err != nil {
		d.Logger.WarnContext(ctx, "the draw of a sale could not be read", "sale", id, "error", err)
	}
	changes, err := d.Catalog.History(ctx, id, historyMax)
	if err != nil {
		p.HistoryProblem, _, _ = explain(err)
	}
	for _, c := range slices.Backward(changes) {
		p.History = append(p.History, change{c, details(c.Data)})
	}
	return page{template: "sale", title: p.Name, body: p}, nil
}

// countedSale is a sale as the fleet has it, without rates.
func countedSale(c catalog.CountedSale) fleet.Sale {
	sale := fleet.NewSale(&c)
	sale.SetUnits(&c)
	if c.Items != nil {
		sale.Items = c.Items
	}
	return sale
}

// Once adds the figures of a sale that the fleet does not watch to the figures of the page.
func (v view) Once(s fleet.Sale) view {
	board := live.Board{Values: maps.Clone(v.Board.Values)}
	saleValues(board.Values, s, v.Now)
	v.Board = &board
	return v
}

// change returns the handler of a form that changes a sale.
func (d salePages) change(
	name string, do func(ctx context.Context, form url.Values, sale uuid.UUID) (string, error),
) sessionHandler {
	return d.act(actTimeout, func(ctx context.Context, r *http.Request, _ string) (action, error) {
		id, err := saleID(r)
		return action{name, []any{"sale", id}, "/sales/" + id.String(), func() (string, error) {
			return do(ctx, r.PostForm, id)
		}}, err
	})
}

func (d salePages) pause(ctx context.Context, _ url.Values, id uuid.UUID) (string, error) {
	_, err := d.Catalog.Pause(ctx, id)
	return "The sale is paused: purchases are refused until it is resumed.", err
}

func (d salePages) resume(ctx context.Context, _ url.Values, id uuid.UUID) (string, error) {
	sale, err := d.Catalog.Resume(ctx, id)
	return "The sale is resumed: it is " + string(sale.State) + ".", err
}

func (d salePages) restock(ctx context.Context, form url.Values, id uuid.UUID) (string, error) {
	if !form.Has("units") {
		return d.restockItems(ctx, form, id)
	}
	units, err := strconv.ParseInt(field(form, "units"), 10, 64)
	if err != nil || units == 0 {
		return "", errUnits
	}
	key, err := formKey(form)
	if err != nil {
		return "", err
	}
	sale, err := d.Catalog.Restock(ctx, id, units, key)
	if err != nil {
		return "", err
	}
	if units < 0 {
		return fmt.Sprintf("%s units were removed: the stock is %s.", count(-units), count(sale.Stock)), nil
	}
	return fmt.Sprintf("%s units were added: the stock is %s.", count(units), count(sale.Stock)), nil
}

var errUnits = &refusal{
	"Restock takes a whole number of units, such as 50, or -50 to remove unsold ones.", "Nothing was done.",
}

// itemUnits begins the name of the field with the units of an item.
const itemUnits = "units."

// restockItems restocks the items whose fields are not empty, all or none.
func (d salePages) restockItems(ctx context.Context, form url.Values, id uuid.UUID) (string, error) {
	items := make(map[string]int64)
	for name := range form {
		code, ok := strings.CutPrefix(name, itemUnits)
		if !ok || field(form, name) == "" {
			continue
		}
		units, err := strconv.ParseInt(field(form, name), 10, 64)
		if err != nil || units == 0 {
			return "", errUnits
		}
		items[code] = units
	}
	if len(items) == 0 {
		return "", errUnits
	}
	key, err := formKey(form)
	if err != nil {
		return "", err
	}
	sale, err := d.Catalog.RestockItems(ctx, id, items, key)
	if err != nil {
		return "", err
	}
	var changed []string
	for _, item := range sale.Items {
		if units := items[item.Code]; units > 0 {
			changed = append(changed, fmt.Sprintf("%s units of %s were added: its stock is %s.",
				count(units), item.Code, count(item.Stock)))
		} else if units < 0 {
			changed = append(changed, fmt.Sprintf("%s units of %s were removed: its stock is %s.",
				count(-units), item.Code, count(item.Stock)))
		}
	}
	return strings.Join(changed, " "), nil
}

// formKey is the idempotency key that the page of a form has made.
func formKey(form url.Values) (string, error) {
	key := form.Get("key")
	if _, err := uuid.Parse(key); err != nil {
		return "", errForm
	}
	return key, nil
}

func (d salePages) end(ctx context.Context, form url.Values, id uuid.UUID) (string, error) {
	sale, err := d.Catalog.Show(ctx, id)
	if err != nil {
		return "", err
	}
	if typed := field(form, "name"); typed != strings.TrimSpace(sale.Name) && typed != format.Printable(sale.Name) {
		return "", &refusal{
			"That is not the name of this sale.", "Nothing was done. Type the name as it stands at the top of the page.",
		}
	}
	_, err = d.Catalog.End(ctx, id)
	return "The sale is ended, permanently.", err
}

// salesPage is the body of the list of all sales.
type salesPage struct {
	Rows   []fleet.Sale
	Filter catalog.SaleFilter
	// States are those that can be chosen.
	States []reservation.State
	Next   string // the URL of older ones
	Key    string
}

func (d salePages) list(ctx context.Context, r *http.Request) (page, error) {
	q := r.URL.Query()
	after, err := uuid.Parse(q.Get("after"))
	if err != nil {
		after = uuid.Nil
	}
	p := salesPage{
		Key: uuid.NewString(), Filter: catalog.SaleFilter{Name: field(q, "name"), State: reservation.State(q.Get("state"))},
		States: []reservation.State{
			reservation.StateScheduled, reservation.StateOpen, reservation.StatePaused, reservation.StateEnded,
		},
	}
	found, next, err := d.Catalog.Search(ctx, p.Filter, after, salesOnPage)
	if err != nil {
		return page{}, err
	}
	ids := make([]uuid.UUID, len(found))
	for i, sale := range found {
		ids[i] = sale.ID
	}
	counted, err := d.Catalog.CountSales(ctx, ids)
	slices.SortFunc(counted, func(a, b catalog.CountResult) int { return bytes.Compare(b.ID[:], a.ID[:]) })
	followed := d.Fleet.Snapshot().Sales
	for _, c := range counted {
		sale := countedSale(c.CountedSale)
		sale.UnitsKnown = c.Err == nil
		for _, followed := range followed {
			if followed.ID == sale.ID {
				sale.Shut = followed.Shut
			}
		}
		p.Rows = append(p.Rows, sale)
	}
	if next != uuid.Nil {
		older := url.Values{"after": {next.String()}}
		if p.Filter != (catalog.SaleFilter{}) {
			older["name"], older["state"] = []string{p.Filter.Name}, []string{string(p.Filter.State)}
		}
		p.Next = "/sales?" + older.Encode()
	}
	return page{template: "sales", title: "All sales", body: p}, err
}

// create makes a sale; a second sending of the form makes no second one.
func (d salePages) create(ctx context.Context, r *http.Request, _ string) (action, error) {
	form := r.PostForm
	return action{"create", []any{"name", form.Get("name")}, "/sales", func() (string, error) {
		key, err := formKey(form)
		if err != nil {
			return "", err
		}
		terms, err := formTerms(form)
		if err != nil {
			return "", err
		}
		sale, _, err := d.Catalog.CreateOnce(ctx, terms, key)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("The sale %s is created, with %s units: it is %s.",
			format.Printable(sale.Name), count(sale.Stock), sale.State), nil
	}}, nil
}

// formTerms reads the terms of a new sale.
func formTerms(form url.Values) (t reservation.Terms, err error) {
	number := func(name string) (n int64) {
		text := field(form, name)
		if n, e := strconv.ParseInt(text, 10, 64); e == nil {
			return n
		}
		if text != "" {
			err = &refusal{fmt.Sprintf("%q is not a whole number.", text), "Nothing was done. Correct it, and send it again."}
		}
		return 0
	}
	at := func(name string) time.Time {
		text := field(form, name)
		if text == "" {
			return time.Time{}
		}
		for _, layout := range []string{"2006-01-02T15:04", "2006-01-02T15:04:05", time.RFC3339} {
			if t, e := time.Parse(layout, text); e == nil && !t.IsZero() { // which would stand for none
				return t
			}
		}
		err = &refusal{fmt.Sprintf("%q is not a time.", text), "Nothing was done. Times are in UTC, such as 2026-11-27T09:00."}
		return time.Time{}
	}
	// A product that overflows could be in bounds.
	window := 60 * min(max(number("window"), -1), int64(order.MaxPaymentWindow/time.Minute)+1)
	t = reservation.Terms{
		Name: field(form, "name"), Stock: number("stock"), PerOrderLimit: number("limit"),
		OpensAt: at("opens"), ClosesAt: at("closes"),
		PaymentWindow: reservation.Seconds(window), PaymentGrace: reservation.Seconds(number("grace")),
		PaymentsPerSecond: number("pace"), Currency: strings.ToUpper(field(form, "currency")), Shards: int(number("shards")),
	}
	if text := field(form, "price"); text != "" {
		var ok bool
		if t.UnitPrice, ok = format.ParseMoney(text, t.Currency); !ok {
			err = &refusal{
				fmt.Sprintf("%q is not an amount of %s.", text, cmp.Or(t.Currency, "a currency")),
				"Nothing was done. Write it like 49.50, with a point and no more digits than the currency has.",
			}
		}
	}
	return t, err
}
