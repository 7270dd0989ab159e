package reservation

import (
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/reservation/order"
)

// State is the state of a sale. Operators set it to open, paused or ended; an open sale is
// Scheduled before its opening time, and an open or paused sale is Ended after its closing time.
type State string

// The states of a sale.
const (
	StateScheduled State = "scheduled"
	StateOpen      State = "open"
	StatePaused    State = "paused"
	StateEnded     State = "ended"
)

// The states that an open sale has in Redis (lua/reserve.lua) if it is in a draw or has a waiting list.
const (
	// StateOffers: units are given by Store.Offer only.
	StateOffers State = "offers"
	// StateWaitlist: the sale sells to everybody until units return to it when none are left.
	StateWaitlist State = "waitlist"
)

// ErrSaleNotFound is returned when no sale has the id.
var ErrSaleNotFound = errors.New("sale not found")

// IllegalTransitionError is returned when an operator's action does not fit the state of the sale.
type IllegalTransitionError struct {
	Action string
	State  State
	// Instead is what to do, or empty.
	Instead string
}

func (e *IllegalTransitionError) Error() string {
	text := fmt.Sprintf("cannot %s a sale that is %s", e.Action, e.State)
	if e.Instead != "" {
		text += ": " + e.Instead
	}
	return text
}

// Terms are the settings of a new sale.
type Terms struct {
	Name string
	// Stock is the number of units for sale: of all items together if there are some.
	Stock int64
	// Items are what the sale sells, at most order.MaxItems; none in a sale of one thing. Each has a letter in the
	// lines of orders, by its place.
	Items []Item
	// PerOrderLimit is the most units that one order may hold, of all items together.
	PerOrderLimit int64
	// OpensAt is when the sale opens; zero for immediately.
	OpensAt time.Time
	// ClosesAt is when the sale closes; zero for never.
	ClosesAt time.Time
	// PaymentWindow is how long a confirmed order waits for its payment; 0 if confirmed orders are final.
	PaymentWindow time.Duration
	// PaymentGrace is how long after its deadline an order still takes money. Buyers are not told of it.
	PaymentGrace time.Duration
	// PaymentsPerSecond is how many orders a second get their turn to pay; 0 for all at once.
	PaymentsPerSecond int64
	// UnitPrice is what a unit costs, in minor units of Currency (ISO 4217); 0 and empty if only the shop knows. In a
	// sale with items they have the prices: all of them or none.
	UnitPrice int64
	Currency  string
	// Shards is how many shards share the stock (Layout), from 1 to the number of partitions. 0 stands for 1.
	Shards int
	// Waitlist has units that return to the sale, or to an item, when none are left offered to those who wait for it.
	Waitlist bool
}

// Item is one of the things that a sale sells, such as a size.
type Item struct {
	// Code names the item in requests: 1 to 32 of a-z, 0-9, ".", "_" and "-".
	Code  string `json:"code"`
	Name  string `json:"name"`
	Stock int64  `json:"stock"`
	// UnitPrice is what a unit costs, in minor units of the sale's currency; 0 if only the shop knows.
	UnitPrice int64 `json:"unit_price,omitzero"`
	// PerOrderLimit is the most units of the item that one order may hold; 0 for that of the sale.
	PerOrderLimit int64 `json:"per_order_limit,omitzero"`
}

// validateItems returns an *InvalidError for the first invalid term of the items.
func (t Terms) validateItems() error {
	if len(t.Items) == 0 {
		return nil
	}
	invalid := func(field, format string, args ...any) error {
		return &order.InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(t.Items) > order.MaxItems:
		return invalid("items", "must be at most %d", order.MaxItems)
	case t.UnitPrice > 0:
		return invalid("unit_price", "must be left out: items have theirs")
	case t.Shards > 1:
		return invalid("shards", "must be 1 in a sale with items")
	}
	codes, stock := map[string]bool{}, int64(0)
	for n, i := range t.Items {
		field := func(name string) string { return fmt.Sprintf("items[%d].%s", n, name) }
		switch {
		case !order.IsItemCode(i.Code):
			return invalid(field("code"), "must be 1 to 32 of a-z, 0-9, dot, underscore and hyphen")
		case codes[i.Code]:
			return invalid(field("code"), "is that of another item")
		case i.Stock < 1 || i.Stock > order.MaxStock:
			return invalid(field("stock"), "must be a whole number from 1 to %d", order.MaxStock)
		case i.UnitPrice < 0 || i.UnitPrice > order.MaxUnitPrice:
			return invalid(field("unit_price"), "must be a whole number of minor units from 1 to %d", order.MaxUnitPrice)
		case (i.UnitPrice > 0) != (t.Currency != ""):
			return invalid(field("unit_price"), "must be given for all items, with a currency, or for none")
		case i.PerOrderLimit < 0 || i.PerOrderLimit > order.MaxPerOrder:
			return invalid(field("per_order_limit"), "must be a whole number from 1 to %d", order.MaxPerOrder)
		}
		if err := order.ValidateText(field("name"), i.Name, order.MaxNameRunes); err != nil {
			return err
		}
		codes[i.Code] = true
		stock += i.Stock
	}
	switch {
	case stock != t.Stock:
		return invalid("stock", "must be left out: items have theirs")
	case stock > order.MaxStock:
		return invalid("items", "must have at most %d units together", order.MaxStock)
	}
	return nil
}

// Codes returns the codes of the items, in their order.
func (t Terms) Codes() []string {
	var codes []string
	for _, i := range t.Items {
		codes = append(codes, i.Code)
	}
	return codes
}

// Validate returns an *InvalidError for the first invalid term. sql/queries/audit/terms.sql has the same bounds.
func (t Terms) Validate() error {
	if err := order.ValidateText("name", t.Name, order.MaxNameRunes); err != nil {
		return err
	}
	if err := t.validateItems(); err != nil {
		return err
	}
	switch {
	case t.Stock < 1 || t.Stock > order.MaxStock:
		return &order.InvalidError{Field: "stock", Reason: fmt.Sprintf("must be a whole number from 1 to %d", order.MaxStock)}
	case t.PerOrderLimit < 1 || t.PerOrderLimit > order.MaxPerOrder:
		return &order.InvalidError{
			Field: "per_order_limit", Reason: fmt.Sprintf("must be a whole number from 1 to %d", order.MaxPerOrder),
		}
	case !t.OpensAt.IsZero() && !representable(t.OpensAt):
		return &order.InvalidError{Field: "opens_at", Reason: "must be between the years 1970 and 9999"}
	case !t.ClosesAt.IsZero() && !representable(t.ClosesAt):
		return &order.InvalidError{Field: "closes_at", Reason: "must be between the years 1970 and 9999"}
	case !t.OpensAt.IsZero() && !t.ClosesAt.IsZero() && !t.OpensAt.Before(t.ClosesAt):
		return &order.InvalidError{Field: "closes_at", Reason: "must be later than opens_at"}
	case t.PaymentWindow < 0 || t.PaymentWindow > order.MaxPaymentWindow || t.PaymentWindow%time.Second != 0:
		return &order.InvalidError{
			Field:  "payment_window_seconds",
			Reason: fmt.Sprintf("must be a whole number from 0 to %d", int(order.MaxPaymentWindow/time.Second)),
		}
	case t.PaymentGrace < 0 || t.PaymentGrace > order.MaxPaymentGrace || t.PaymentGrace%time.Second != 0:
		return &order.InvalidError{
			Field:  "payment_grace_seconds",
			Reason: fmt.Sprintf("must be a whole number from 0 to %d", int(order.MaxPaymentGrace/time.Second)),
		}
	case t.PaymentsPerSecond < 0 || t.PaymentsPerSecond > order.MaxPaymentsPerSecond:
		return &order.InvalidError{
			Field: "payments_per_second", Reason: fmt.Sprintf("must be a whole number from 0 to %d", order.MaxPaymentsPerSecond),
		}
	case t.PaymentWindow == 0 && t.PaymentGrace > 0:
		return &order.InvalidError{Field: "payment_grace_seconds", Reason: "needs payment_window_seconds"}
	case t.PaymentWindow == 0 && t.PaymentsPerSecond > 0:
		return &order.InvalidError{Field: "payments_per_second", Reason: "needs payment_window_seconds"}
	case t.UnitPrice < 0 || t.UnitPrice > order.MaxUnitPrice:
		return &order.InvalidError{
			Field: "unit_price", Reason: fmt.Sprintf("must be a whole number of minor units from 1 to %d", order.MaxUnitPrice),
		}
	case t.Currency != "" && !order.IsCurrency(t.Currency):
		return &order.InvalidError{Field: "currency", Reason: "must be a code of ISO 4217, such as EUR"}
	case t.UnitPrice == 0 && t.Currency != "" && len(t.Items) == 0:
		return &order.InvalidError{Field: "currency", Reason: "needs unit_price"}
	case t.UnitPrice > 0 && t.Currency == "":
		return &order.InvalidError{Field: "unit_price", Reason: "needs currency"}
	case t.Shards < 0 || t.Shards > MaxPartitions:
		return &order.InvalidError{Field: "shards", Reason: fmt.Sprintf("must be a whole number from 1 to %d", MaxPartitions)}
	}
	return nil
}

// Equal is true for terms that are equal in Postgres, which keeps microseconds.
func (t Terms) Equal(other Terms) bool {
	for _, terms := range []*Terms{&t, &other} {
		terms.Shards = max(1, terms.Shards)
		terms.OpensAt = terms.OpensAt.UTC().Truncate(time.Microsecond)
		terms.ClosesAt = terms.ClosesAt.UTC().Truncate(time.Microsecond)
		terms.Items = append([]Item{}, terms.Items...)
	}
	return reflect.DeepEqual(t, other)
}

// representable is true for times that the scripts can compare: as milliseconds since 1970, of which
// 0 means none.
func representable(t time.Time) bool {
	return t.UnixMilli() > 0 && t.UTC().Year() <= 9999
}

// Sale is the definition of a sale in Postgres.
type Sale struct {
	ID uuid.UUID
	Terms
	// State is the state that operators last set: open, paused or ended.
	State State
	// Sold is the units of live orders in Postgres. Invariant: 0 <= Sold <= Stock.
	Sold int64
	// Epoch counts the rebuilds of the sale's stock in Redis, from 1; a script refuses a caller of
	// another epoch.
	Epoch int64
	// Revision counts the changes of the definition, from 1; Redis applies them in this order.
	Revision int64
	// Partitions is the number of partitions at the sale's creation, which determines those of its shards.
	Partitions int
	// OffersOnly is true for the goods of a draw, and for the sale in which people wait: it has a route of its own.
	OffersOnly bool
	// EntriesID is the sale in which people enter the draw, or wait; uuid.Nil without one.
	EntriesID uuid.UUID
	// WaitlistClosed is true if nobody can join the waiting list any more.
	WaitlistClosed bool
	// EntryFor is the sale whose units are offered to those who enter this one, which has no stock; uuid.Nil of all
	// others.
	EntryFor  uuid.UUID
	CreatedAt time.Time
}

// SaleRow is a sale as queries return it, without the units sold.
type SaleRow struct {
	ID                   uuid.UUID
	Name                 string
	Stock                int64
	State                State
	PerOrderLimit        int64
	OpensAt, ClosesAt    zeronull.Timestamptz
	PaymentWindowSeconds int64
	PaymentGraceSeconds  int64
	PaymentsPerSecond    int64
	UnitPrice            zeronull.Int8
	Currency             zeronull.Text
	Items                []Item
	Epoch, Revision      int64
	Partitions, Shards   int
	OffersOnly           bool
	EntriesID            zeronull.UUID
	WaitlistClosed       bool
	EntryFor             zeronull.UUID
	CreatedAt            time.Time
}

// Sale returns the definition that the row holds.
func (r *SaleRow) Sale() Sale {
	return Sale{
		ID: r.ID,
		Terms: Terms{
			Name: r.Name, Stock: r.Stock, Items: r.Items, PerOrderLimit: r.PerOrderLimit, OpensAt: inUTC(r.OpensAt),
			ClosesAt:      inUTC(r.ClosesAt),
			PaymentWindow: time.Duration(r.PaymentWindowSeconds) * time.Second,
			PaymentGrace:  time.Duration(r.PaymentGraceSeconds) * time.Second, PaymentsPerSecond: r.PaymentsPerSecond,
			UnitPrice: int64(r.UnitPrice), Currency: string(r.Currency), Shards: r.Shards,
			Waitlist: r.EntriesID != zeronull.UUID{} && !r.OffersOnly,
		},
		State: r.State, Epoch: r.Epoch, Revision: r.Revision, Partitions: r.Partitions,
		OffersOnly: r.OffersOnly, EntriesID: uuid.UUID(r.EntriesID), WaitlistClosed: r.WaitlistClosed,
		EntryFor: uuid.UUID(r.EntryFor), CreatedAt: r.CreatedAt.UTC(),
	}
}

// inUTC returns the time in UTC, or the zero time for none.
func inUTC(at zeronull.Timestamptz) time.Time {
	if t := time.Time(at); !t.IsZero() {
		return t.UTC()
	}
	return time.Time{}
}

// Layout returns where the sale is in Redis.
func (s Sale) Layout() Layout { return LayoutOf(s.ID, s.Partitions, s.Shards) }

// StateAt returns the state of the sale for a buyer at that time.
func (s Sale) StateAt(now time.Time) State {
	switch {
	case s.State == StateEnded, !s.ClosesAt.IsZero() && !now.Before(s.ClosesAt):
		return StateEnded
	case s.State == StateOpen && now.Before(s.OpensAt):
		return StateScheduled
	}
	return s.State
}
