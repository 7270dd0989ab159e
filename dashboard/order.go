package dashboard

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/dashboard/session"
	"stampede/internal/figure"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

const ordersOnPage = 50

// ordersPage is the body of the page that finds orders.
type ordersPage struct {
	Order, User, Sale, Status string
	Statuses                  []order.Status
	// Searched is true if there was something to look for.
	Searched      bool
	Rows          []order.Placed
	Next          string // the URL of older ones
	Problem, Hint string
}

func (d *Dashboard) showOrders(w http.ResponseWriter, r *http.Request, s *session.Session) {
	q := r.URL.Query()
	page := ordersPage{
		Order: strings.TrimSpace(q.Get("order")), User: strings.TrimSpace(q.Get("user")),
		Sale: strings.TrimSpace(q.Get("sale")), Status: q.Get("status"), Statuses: order.Recorded(),
	}
	if page.Order != "" {
		if id, err := uuid.Parse(page.Order); err == nil {
			to := "/orders/" + id.String()
			if page.User != "" {
				to += "?user=" + url.QueryEscape(page.User)
			}
			http.Redirect(w, r, to, http.StatusSeeOther)
			return
		}
		page.Problem = "That is not the id of an order: it is like 01a1fef0-cb72-76d5-818b-64550bc6ed90."
	}
	status := http.StatusOK
	if page.Searched = page.Problem == "" && (page.User != "" || page.Sale != ""); page.Searched {
		if err := d.findOrders(r, &page); err != nil {
			page.Problem, page.Hint, status = explain(err)
		}
	}
	d.render(w, r, s, status, "orders", "Orders", page)
}

func (d *Dashboard) findOrders(r *http.Request, page *ordersPage) (err error) {
	of := order.Filter{User: page.User}
	if page.Sale != "" {
		if of.Sale, err = uuid.Parse(page.Sale); err != nil {
			return &refusal{"That is not the id of a sale.", "It is at the top of the page of each sale."}
		}
	}
	if page.User != "" {
		if err := order.ValidateUser(page.User); err != nil {
			return err
		}
	}
	if page.Status != "" {
		if of.Status = order.Status(page.Status); !slices.Contains(page.Statuses, of.Status) {
			return &refusal{"There is no such status.", ""}
		}
	}
	before, _ := uuid.Parse(r.URL.Query().Get("before")) // without one, the newest
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	rows, next, err := d.ledger.ListOrders(ctx, of, before, ordersOnPage)
	if err != nil {
		return err
	}
	page.Rows = rows
	if next != uuid.Nil {
		page.Next = "/orders?" + url.Values{
			"user": {page.User}, "sale": {page.Sale}, "status": {page.Status}, "before": {next.String()},
		}.Encode()
	}
	return nil
}

// orderPage is the body of the page of an order.
type orderPage struct {
	order.Placed
	SaleName string
	Steps    []step
	// Cancellable is true while an operator can cancel it.
	Cancellable bool
	ReasonMax   int
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

func orderArg(r *http.Request) (uuid.UUID, error) {
	id, err := uuid.Parse(r.PathValue("order"))
	if err != nil {
		return uuid.Nil, order.ErrNotFound
	}
	return id, nil
}

func (d *Dashboard) showOrder(w http.ResponseWriter, r *http.Request, s *session.Session) {
	id, err := orderArg(r)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
	defer cancel()
	o, log, err := d.ledger.History(ctx, id)
	if user := strings.TrimSpace(r.URL.Query().Get("user")); errors.Is(err, order.ErrNotFound) && user != "" {
		if o.Order, err = d.Store.FindReserved(ctx, id, user); err == nil {
			log = []order.Logged{{Version: 1, Type: order.EventReserved, OccurredAt: o.ReservedAt, Data: []byte("{}")}}
		}
	}
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	page := orderPage{Placed: o, ReasonMax: reasonMax}
	for _, sale := range d.Fleet.Snapshot().Sales {
		if sale.ID == o.SaleID {
			page.SaleName = sale.Name
		}
	}
	_, changed, err := o.Withdrawn()
	page.Cancellable = err == nil && changed && o.Status != order.StatusReserved
	page.Steps = stepsOf(o, log, d.entryOf(ctx, o))
	d.render(w, r, s, http.StatusOK, "order", "Order "+id.String()[:8], page)
}

// whereOf says which process writes an event.
var whereOf = map[order.EventType]string{
	order.EventReserved: "ingress and Redis", order.EventConfirmed: "worker and Postgres",
	order.EventRejected: "worker and Postgres", order.EventVoided: "worker and Postgres",
	order.EventPaid: "ingress and Postgres", order.EventExpired: "worker and Postgres",
}

var whatOf = map[order.EventType]string{
	order.EventReserved: "reserved: units taken, entry appended", order.EventConfirmed: "recorded: confirmed",
	order.EventRejected: "recorded: rejected", order.EventVoided: "recorded: voided",
	order.EventPaid: "paid", order.EventCancelled: "cancelled", order.EventExpired: "expired: not paid in time",
}

func stepsOf(o order.Placed, log []order.Logged, e *entry) (steps []step) {
	for _, event := range log {
		s := step{
			At: event.OccurredAt, Where: whereOf[event.Type], What: whatOf[event.Type], Details: detailsOf(event.Data),
		}
		if event.Type == order.EventCancelled {
			s.Where = "ingress and Postgres"
			for _, detail := range s.Details {
				if detail.Name == "operator" {
					s.Where, s.What = "an operator", "cancelled by an operator"
				}
			}
		}
		steps = append(steps, s)
		if event.Type == order.EventReserved && e != nil {
			steps = append(steps, e.step(o))
		}
	}
	if o.Status == order.StatusConfirmed && !o.ExpiresAt.IsZero() {
		steps = append(steps, step{
			At: o.ExpiresAt, Where: "worker and Postgres", What: "expires, unless it is paid", Rest: true,
		})
	}
	for i := 1; i < len(steps); i++ {
		steps[i].Gap = steps[i].At.Sub(steps[i-1].At)
	}
	return steps
}

// entry is the entry of the stream that has an order, if Redis still has it.
type entry struct {
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
		{"stream", e.stream}, {"entry", e.id}, {"orders in it", count(e.orders)},
	}}
	if err != nil {
		s.At = o.ReservedAt
	}
	switch {
	case e.pending != nil:
		s.What = "a worker has its entry, and has not finished it"
		s.Details = append(s.Details, detail{"worker", e.pending.Consumer},
			detail{"deliveries", count(e.pending.RetryCount)}, detail{"for", lasting(e.pending.Idle)})
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

// entryOf looks for the entry of an order. It is a detail: without an answer there is none.
func (d *Dashboard) entryOf(ctx context.Context, o order.Placed) *entry {
	if o.ReservedAt.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	from, to := o.ReservedAt.Add(-entrySpread).UnixMilli(), o.ReservedAt.Add(entrySpread).UnixMilli()
	for p := range d.Keys.Partitions {
		key := d.Keys.Orders(p)
		found, err := d.Redis.XRangeN(ctx, key, strconv.FormatInt(from, 10), strconv.FormatInt(to, 10), entriesMax).Result()
		if err != nil {
			continue
		}
		for _, m := range found {
			orders, _ := deadletter.OrdersOf(stream.Entry{Stream: key, ID: m.ID, Fields: stream.FieldsOf(m.Values)})
			if !slices.ContainsFunc(orders, func(e order.OrderReserved) bool { return e.OrderID == o.ID }) {
				continue
			}
			return d.stateOf(ctx, &entry{stream: key, id: m.ID, orders: len(orders)})
		}
	}
	return nil
}

func (d *Dashboard) stateOf(ctx context.Context, e *entry) *entry {
	pending, err := d.Redis.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: e.stream, Group: reservation.Group, Start: e.id, End: e.id, Count: 1,
	}).Result()
	if err == nil && len(pending) == 1 {
		e.pending = &pending[0]
		return e
	}
	groups, err := d.Redis.XInfoGroups(ctx, e.stream).Result()
	for _, g := range groups {
		if err == nil && g.Name == reservation.Group {
			e.read = !stream.EntryAfter(e.id, g.LastDeliveredID)
		}
	}
	return e
}

const reasonMax = 500

// cancelOrder cancels an order for an operator, as stampede order cancel does.
func (d *Dashboard) cancelOrder(w http.ResponseWriter, r *http.Request, s *session.Session) {
	if !d.readForm(w, r, s) {
		return
	}
	id, err := orderArg(r)
	if err != nil {
		d.fail(w, r, s, err)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), actTimeout)
	defer cancel()
	d.act(w, r, s, "cancel", "/orders/"+id.String(), []any{"order", id}, func() (string, error) {
		reason := strings.TrimSpace(r.PostForm.Get("reason"))
		if reason == "" {
			return "", &refusal{"Say why the order is cancelled.", "Nothing was done. The reason is recorded with it."}
		}
		if err := order.ValidateReason(reason); err != nil {
			return "", err
		}
		o, err := d.ledger.Withdraw(ctx, id, reason, s.Person().Name)
		if err != nil {
			return "", err
		}
		text := "The order is cancelled; its units go back to the sale."
		if o.PaymentReference != "" {
			text += fmt.Sprintf(" Refund the payment %s.", figure.Printable(o.PaymentReference))
		}
		return text, nil
	})
}
