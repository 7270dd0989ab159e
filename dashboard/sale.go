package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/dashboard/fleet"
	"stampede/dashboard/live"
	"stampede/dashboard/session"
	"stampede/internal/figure"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	// lookTimeout bounds what a page asks the servers, actTimeout what an action does.
	lookTimeout = 5 * time.Second
	actTimeout  = 15 * time.Second
	historyMax  = 200
	salesOnPage = 50
)

// salePage is the body of the page of a sale.
type salePage struct {
	fleet.Sale
	// Watched is false for a sale that is older than those that the fleet looks at: its figures are those of the request.
	Watched  bool
	Rebuilds []fleet.Rebuild
	History  []change
	// HistoryProblem is set if the history cannot be read.
	HistoryProblem string
	Table          table
	// Key makes a second sending of the form the same restock.
	Key string
}

// change is a row of the history.
type change struct {
	catalog.Change
	Details []detail
}

// detail is a member of the data of an event.
type detail struct{ Name, Value string }

// detailsOf returns the members of a JSON object, in the order of their names.
func detailsOf(data []byte) (found []detail) {
	var members map[string]json.RawMessage
	if json.Unmarshal(data, &members) != nil {
		return []detail{{"data", figure.Printable(string(data))}}
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		value := string(members[name])
		var text string
		if json.Unmarshal(members[name], &text) == nil {
			value = text
		}
		found = append(found, detail{strings.ReplaceAll(name, "_", " "), figure.Printable(value)})
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

func (d *Dashboard) showSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	id, err := saleID(r)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	snapshot := d.Fleet.Snapshot()
	page := salePage{Key: uuid.NewString(), Table: tableOf(d.Fleet.History(), id.String())}
	for _, sale := range snapshot.Sales {
		if sale.ID == id {
			page.Sale, page.Watched = sale, true
		}
	}
	if !page.Watched {
		counted, err := d.Catalog.Show(ctx, id)
		if err != nil {
			d.fail(w, r, s, err)
			return
		}
		page.Sale = saleOf(counted)
	}
	for _, rebuild := range snapshot.Rebuilds {
		if rebuild.Sale == id || rebuild.Sale == uuid.Nil {
			page.Rebuilds = append(page.Rebuilds, rebuild)
		}
	}
	changes, err := d.Catalog.History(ctx, id, historyMax)
	if err != nil {
		page.HistoryProblem, _, _ = explain(err)
	}
	for _, c := range slices.Backward(changes) {
		page.History = append(page.History, change{c, detailsOf(c.Data)})
	}
	d.render(w, r, s, http.StatusOK, "sale", page.Name, page)
}

// saleOf is a sale as the fleet has it, without rates.
func saleOf(c catalog.CountedSale) fleet.Sale {
	return fleet.Sale{
		ID: c.ID, Name: c.Name, State: c.State, Shards: max(c.Shards, 1), PerOrderLimit: c.PerOrderLimit,
		OpensAt: c.OpensAt, ClosesAt: c.ClosesAt, PaymentWindow: c.PaymentWindow,
		Stock: c.Stock, Available: c.Available, Held: c.Held, Sold: c.Sold, UnitsKnown: true,
	}
}

// Once adds the figures of a sale that the fleet does not look at to those of the page.
func (v view) Once(s fleet.Sale) view {
	board := live.Board{Values: maps.Clone(v.Board.Values)}
	saleValues(board.Values, s, v.Now)
	for _, name := range []string{"offered", "accepted", "refused", "shed", "failed"} {
		board.Values[s.ID.String()+"."+name] = unknown
	}
	v.Board = &board
	return v
}

// changeSale runs an action on a sale, as the operator.
func (d *Dashboard) changeSale(
	w http.ResponseWriter, r *http.Request, s *session.Session, what string,
	do func(ctx context.Context, sale uuid.UUID) (string, error),
) {
	if !d.readForm(w, r, s) {
		return
	}
	id, err := saleID(r)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	// An operator who closes the page does not take back what was begun.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), actTimeout)
	defer cancel()
	d.act(w, r, s, what, "/sales/"+id.String(), []any{"sale", id}, func() (string, error) {
		return do(catalog.WithOperator(ctx, s.Person().Name), id)
	})
}

func (d *Dashboard) pauseSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.changeSale(w, r, s, "pause", func(ctx context.Context, id uuid.UUID) (string, error) {
		_, err := d.Catalog.Pause(ctx, id)
		return "The sale is paused: purchases are refused until it is resumed.", err
	})
}

func (d *Dashboard) resumeSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.changeSale(w, r, s, "resume", func(ctx context.Context, id uuid.UUID) (string, error) {
		sale, err := d.Catalog.Resume(ctx, id)
		return "The sale is resumed: it is " + string(sale.State) + ".", err
	})
}

func (d *Dashboard) restockSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.changeSale(w, r, s, "restock", func(ctx context.Context, id uuid.UUID) (string, error) {
		units, err := strconv.ParseInt(strings.TrimSpace(r.PostForm.Get("units")), 10, 64)
		if err != nil || units == 0 {
			return "", &refusal{
				"Restock takes a whole number of units, such as 50, or -50 to remove unsold ones.", "Nothing was done.",
			}
		}
		key := r.PostForm.Get("key")
		if _, err := uuid.Parse(key); err != nil {
			return "", &refusal{"The form is damaged.", "Nothing was done. Load the page again."}
		}
		sale, err := d.Catalog.Restock(ctx, id, units, key)
		if err != nil {
			return "", err
		}
		if units < 0 {
			return fmt.Sprintf("%s units were removed: the stock is %s.", count(-units), count(sale.Stock)), nil
		}
		return fmt.Sprintf("%s units were added: the stock is %s.", count(units), count(sale.Stock)), nil
	})
}

func (d *Dashboard) endSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	d.changeSale(w, r, s, "end", func(ctx context.Context, id uuid.UUID) (string, error) {
		sale, err := d.Catalog.Show(ctx, id)
		if err != nil {
			return "", err
		}
		// A browser trims nothing, and people copy with a blank.
		if strings.TrimSpace(r.PostForm.Get("name")) != strings.TrimSpace(sale.Name) {
			return "", &refusal{
				"That is not the name of this sale.", "Nothing was done. Type the name as it stands at the top of the page.",
			}
		}
		_, err = d.Catalog.End(ctx, id)
		return "The sale is ended, permanently.", err
	})
}

// salesPage is the body of the list of all sales.
type salesPage struct {
	Rows []fleet.Sale
	Next uuid.UUID
	Key  string
}

func (d *Dashboard) showSales(w http.ResponseWriter, r *http.Request, s *session.Session) {
	after, err := uuid.Parse(r.URL.Query().Get("after"))
	if err != nil {
		after = uuid.Nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	found, err := d.Catalog.CountPage(ctx, after, salesOnPage)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	page := salesPage{Key: uuid.NewString()}
	for _, c := range found {
		sale := saleOf(c.CountedSale)
		sale.UnitsKnown = c.Err == nil
		page.Rows = append(page.Rows, sale)
	}
	if len(found) == salesOnPage {
		page.Next = found[len(found)-1].ID
	}
	d.render(w, r, s, http.StatusOK, "sales", "All sales", page)
}

// createSale makes a sale; a second sending of the form makes no second one.
func (d *Dashboard) createSale(w http.ResponseWriter, r *http.Request, s *session.Session) {
	if !d.readForm(w, r, s) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), actTimeout)
	defer cancel()
	d.act(w, r, s, "create", "/sales", []any{"name", r.PostForm.Get("name")}, func() (string, error) {
		terms, err := termsOf(r)
		if err != nil {
			return "", err
		}
		sale, _, err := d.Catalog.CreateOnce(catalog.WithOperator(ctx, s.Person().Name), terms, r.PostForm.Get("key"))
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("The sale %s is created, with %s units: it is %s.", sale.Name, count(sale.Stock), sale.State), nil
	})
}

func termsOf(r *http.Request) (t reservation.Terms, err error) {
	if _, err := uuid.Parse(r.PostForm.Get("key")); err != nil {
		return t, &refusal{"The form is damaged.", "Nothing was done. Load the page again."}
	}
	number := func(name string) (n int64) {
		text := strings.TrimSpace(r.PostForm.Get(name))
		if n, e := strconv.ParseInt(text, 10, 64); e == nil {
			return n
		}
		if text != "" {
			err = &refusal{fmt.Sprintf("%q is not a whole number.", text), "Nothing was done. Correct it, and send it again."}
		}
		return 0
	}
	at := func(name string) time.Time {
		text := strings.TrimSpace(r.PostForm.Get(name))
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
	window := min(max(number("window"), -1), int64(order.MaxPaymentWindow/time.Minute)+1)
	t = reservation.Terms{
		Name: strings.TrimSpace(r.PostForm.Get("name")), Stock: number("stock"), PerOrderLimit: number("limit"),
		OpensAt: at("opens"), ClosesAt: at("closes"),
		PaymentWindow: time.Duration(window) * time.Minute, Shards: int(number("shards")),
	}
	return t, err
}
