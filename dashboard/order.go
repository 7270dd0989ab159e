package dashboard

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

const ordersOnPage = 50

// ordersPage is the body of the page that finds orders.
type ordersPage struct {
	Order, User, Sale, Status string
	// Begins is true for users whose ids begin with User.
	Begins   bool
	Statuses []order.Status
	// Searched is true if there was something to look for.
	Searched      bool
	Rows          []order.Placed
	Next          string // the URL of older ones
	Problem, Hint string
}

var errNoSaleID = &refusal{"That is not the id of a sale.", "It is at the top of the page of each sale."}

// orderPages are the pages of orders and their payments, and the actions on one.
type orderPages struct {
	*site
	ledger *ledger.Ledger
}

func (d orderPages) list(ctx context.Context, r *http.Request) (page, error) {
	q := r.URL.Query()
	body := ordersPage{
		Order: field(q, "order"), User: field(q, "user"), Sale: field(q, "sale"), Status: q.Get("status"),
		Begins: q.Has("begins") || !q.Has("user"), Statuses: order.Recorded(),
	}
	if body.Order != "" {
		if id, err := uuid.Parse(body.Order); err == nil {
			to := "/orders/" + id.String()
			if body.User != "" {
				to += "?user=" + url.QueryEscape(body.User)
			}
			return page{moved: to}, nil
		}
		body.Problem = "That is not the id of an order: it is like 01a1fef0-cb72-76d5-818b-64550bc6ed90."
	}
	p := page{template: "orders", title: "Orders"}
	if body.Searched = body.Problem == "" && (body.User != "" || body.Sale != ""); body.Searched {
		if err := d.find(ctx, q, &body); err != nil {
			body.Problem, body.Hint, p.status = explain(err)
		}
	}
	p.body = body
	return p, nil
}

// find reads the rows of the page: those older than the order before, or, by a beginning, those after the order before
// of the user last.
func (d orderPages) find(ctx context.Context, q url.Values, p *ordersPage) (err error) {
	filter := order.Filter{User: p.User}
	if p.Sale != "" {
		if filter.Sale, err = uuid.Parse(p.Sale); err != nil {
			return errNoSaleID
		}
	}
	next := order.Order{UserID: cmp.Or(q.Get("last"), p.User)}
	if err := order.ValidateUser(next.UserID); err != nil && next.UserID != "" {
		return err
	}
	if p.Status != "" {
		if filter.Status = order.Status(p.Status); !slices.Contains(p.Statuses, filter.Status) {
			return &refusal{"There is no such status.", ""}
		}
	}
	next.ID, _ = uuid.Parse(q.Get("before")) // without one, the first page
	more := url.Values{"user": {p.User}, "sale": {p.Sale}, "status": {p.Status}}
	if p.User != "" && p.Begins {
		p.Rows, next, err = d.ledger.ListByPrefix(ctx, filter, next, ordersOnPage)
		more["begins"], more["last"] = []string{"1"}, []string{next.UserID}
	} else {
		p.Rows, next.ID, err = d.ledger.ListOrders(ctx, filter, next.ID, ordersOnPage)
	}
	if err == nil && next.ID != uuid.Nil {
		more.Set("before", next.ID.String())
		p.Next = "/orders?" + more.Encode()
	}
	return err
}

// orderPage is the body of the page of an order.
type orderPage struct {
	order.Placed
	paymentsShown
	// SaleName is that of a sale that the fleet follows.
	SaleName string
	Steps    []step
	// Cancellable is true while an operator can cancel it.
	Cancellable bool
	ReasonMax   int
	// Grace is how much longer than until ExpiresAt the order takes money.
	Grace time.Duration
}

// step is one thing that happened to an order.
type step struct {
	At time.Time
	// Where is the process that did it, or where it is known from.
	Where, What string
	Details     []detail
	// Gap is the time since the step before.
	Gap  time.Duration
	Rest bool // it is where the order is now
}

func orderID(r *http.Request) (uuid.UUID, error) {
	id, err := uuid.Parse(r.PathValue("order"))
	if err != nil {
		return uuid.Nil, order.ErrNotFound
	}
	return id, nil
}

func (d orderPages) show(ctx context.Context, r *http.Request) (page, error) {
	id, err := orderID(r)
	if err != nil {
		return page{}, err
	}
	o, log, err := d.ledger.History(ctx, id)
	if user := field(r.URL.Query(), "user"); errors.Is(err, order.ErrNotFound) && user != "" {
		if o.Order, err = d.Catalog.Store.FindReserved(ctx, id, user); err == nil {
			log = []order.Logged{{Version: 1, Type: order.EventReserved, OccurredAt: o.ReservedAt, Data: []byte("{}")}}
		}
	}
	if err != nil {
		return page{}, err
	}
	p := orderPage{Placed: o, ReasonMax: reasonMax}
	if p.paymentsShown, err = d.paymentsOf(ctx, id); err != nil {
		return page{}, err
	}
	for _, sale := range d.Fleet.Snapshot().Sales {
		if sale.ID == o.SaleID {
			p.SaleName = sale.Name
		}
	}
	_, changed, err := o.Withdrawn()
	p.Cancellable = err == nil && changed && o.Status != order.StatusReserved
	p.Grace = d.grace(ctx, o)
	p.Steps = steps(o, log, d.findEntry(ctx, o), p.Grace)
	return page{template: "order", title: "Order " + short(id), body: p}, nil
}

// grace is that of the sale of an unpaid order. It is a detail: without an answer there is none.
func (d orderPages) grace(ctx context.Context, o order.Placed) time.Duration {
	if o.Status != order.StatusConfirmed || o.ExpiresAt.IsZero() {
		return 0
	}
	sale, err := d.Catalog.Show(ctx, o.SaleID)
	if err != nil {
		return 0
	}
	return sale.PaymentGrace
}

// eventSteps says which process writes an event, and what it means.
var eventSteps = map[order.EventType]step{
	order.EventReserved:  {Where: "ingress and Redis", What: "reserved: units taken, entry appended"},
	order.EventConfirmed: {Where: "worker and Postgres", What: "recorded: confirmed"},
	order.EventRejected:  {Where: "worker and Postgres", What: "recorded: rejected"},
	order.EventVoided:    {Where: "worker and Postgres", What: "recorded: voided"},
	order.EventPaid:      {Where: "ingress and Postgres", What: "paid"},
	order.EventCancelled: {Where: "ingress and Postgres", What: "cancelled"},
	order.EventExpired:   {Where: "worker and Postgres", What: "expired: not paid in time"},
}

// steps are the events of an order, with its entry between them, and what comes next.
func steps(o order.Placed, log []order.Logged, e *entry, grace time.Duration) (all []step) {
	for _, event := range log {
		s := eventSteps[event.Type]
		s.At, s.Details = event.OccurredAt, details(event.Data)
		if event.Type == order.EventCancelled &&
			slices.ContainsFunc(s.Details, func(d detail) bool { return d.Name == "operator" }) {
			s.Where, s.What = "an operator", "cancelled by an operator"
		}
		all = append(all, s)
		if event.Type == order.EventReserved && e != nil {
			all = append(all, e.step(o))
		}
	}
	if o.Status == order.StatusConfirmed && !o.ExpiresAt.IsZero() {
		all = append(all, step{
			At: o.ExpiresAt.Add(grace), Where: "worker and Postgres", What: "expires, unless it is paid", Rest: true,
		})
	}
	for i := 1; i < len(all); i++ {
		all[i].Gap = all[i].At.Sub(all[i-1].At)
	}
	return all
}

// entry is the entry of the stream that has an order, if Redis still has it.
type entry struct {
	partition  int
	stream, id string
	orders     int
	// pending is set while a worker has it and has not finished it.
	pending *redis.XPendingExt
	read    bool
}

func (e *entry) step(o order.Placed) step {
	ms, _, _ := strings.Cut(e.id, "-")
	at, err := strconv.ParseInt(ms, 10, 64)
	s := step{At: time.UnixMilli(at).UTC(), Where: "stream in Redis", Details: []detail{
		{"partition", strconv.Itoa(e.partition), e.stream}, {"entry", e.id, ""}, {"orders in it", count(e.orders), ""},
	}}
	if err != nil {
		s.At = o.ReservedAt
	}
	switch {
	case e.pending != nil:
		s.What = "a worker has its entry, and has not finished it"
		s.Details = append(s.Details, detail{"worker", e.pending.Consumer, ""},
			detail{"deliveries", count(e.pending.RetryCount), ""}, detail{"for", lasting(e.pending.Idle), ""})
	case o.Status == order.StatusReserved && !e.read:
		s.What = "its entry waits for a worker"
	default:
		s.What = "its entry is finished"
	}
	return s
}

// Entries around the instant of a reservation, in the clock of Redis; a script call has one entry.
const (
	entrySpread = 20 * time.Millisecond
	entriesMax  = 200
)

// findEntry looks for the entry of an order. It is a detail: without an answer there is none.
func (d orderPages) findEntry(ctx context.Context, o order.Placed) *entry {
	if o.ReservedAt.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	from, to := o.ReservedAt.Add(-entrySpread).UnixMilli(), o.ReservedAt.Add(entrySpread).UnixMilli()
	for p := range d.Catalog.Store.Keys.Partitions {
		key := d.Catalog.Store.Keys.Orders(p)
		first, last := strconv.FormatInt(from, 10), strconv.FormatInt(to, 10)
		found, err := d.Catalog.Store.Redis.XRangeN(ctx, key, first, last, entriesMax).Result()
		if err != nil {
			continue
		}
		for _, m := range found {
			orders, _ := deadletter.OrdersOf(stream.Entry{Stream: key, ID: m.ID, Fields: stream.FieldsOf(m.Values)})
			if !slices.ContainsFunc(orders, func(e order.OrderReserved) bool { return e.OrderID == o.ID }) {
				continue
			}
			return d.readState(ctx, &entry{partition: p, stream: key, id: m.ID, orders: len(orders)})
		}
	}
	return nil
}

// readState reads whether a worker has the entry.
func (d orderPages) readState(ctx context.Context, e *entry) *entry {
	pending, err := d.Catalog.Store.Redis.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: e.stream, Group: reservation.Group, Start: e.id, End: e.id, Count: 1,
	}).Result()
	if err == nil && len(pending) == 1 {
		e.pending = &pending[0]
		return e
	}
	groups, err := d.Catalog.Store.Redis.XInfoGroups(ctx, e.stream).Result()
	for _, g := range groups {
		if err == nil && g.Name == reservation.Group {
			e.read = !stream.EntryAfter(e.id, g.LastDeliveredID)
		}
	}
	return e
}

const reasonMax = 500

// cancel cancels an order for an operator, as stampede order cancel does.
func (d orderPages) cancel(ctx context.Context, r *http.Request, operator string) (action, error) {
	id, err := orderID(r)
	return action{"cancel", []any{"order", id}, "/orders/" + id.String(), func() (string, error) {
		reason := field(r.PostForm, "reason")
		if reason == "" {
			return "", &refusal{"Say why the order is cancelled.", "Nothing was done. The reason is recorded with it."}
		}
		if err := order.ValidateReason(reason); err != nil {
			return "", err
		}
		o, err := d.ledger.Withdraw(ctx, id, reason, operator)
		if err != nil {
			return "", err
		}
		text := "The order is cancelled; its units go back to the sale."
		if o.PaymentReference != "" {
			text += " The refund of its payment is due."
		}
		return text, nil
	}}, err
}

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
