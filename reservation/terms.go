package reservation

import (
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/reservation/order"
)

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
	switch {
	case len(t.Items) > order.MaxItems:
		return invalid("items", "must be at most %d", order.MaxItems)
	case t.UnitPrice > 0:
		return invalid("unit_price", "must be left out: items have theirs")
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

// A bound is the range of a term that is a whole number.
type bound struct {
	field           string
	value, min, max int64
	of              string // what it counts, where that is not plain
	optional        bool   // 0 stands for none, or for 1
}

// bounds are those of the terms. sql/queries/audit/terms.sql and ingress/openapi.yaml have the same.
func (t Terms) bounds() []bound {
	return []bound{
		{field: "stock", value: t.Stock, min: 1, max: order.MaxStock},
		{field: "per_order_limit", value: t.PerOrderLimit, min: 1, max: order.MaxPerOrder},
		{field: "payment_window_seconds", value: inSeconds(t.PaymentWindow), max: inSeconds(order.MaxPaymentWindow)},
		{field: "payment_grace_seconds", value: inSeconds(t.PaymentGrace), max: inSeconds(order.MaxPaymentGrace)},
		{field: "payments_per_second", value: t.PaymentsPerSecond, max: order.MaxPaymentsPerSecond},
		{field: "unit_price", value: t.UnitPrice, min: 1, max: order.MaxUnitPrice, of: " of minor units", optional: true},
		{field: "shards", value: int64(t.Shards), min: 1, max: MaxPartitions, optional: true},
	}
}

// Validate returns an *InvalidError for the first invalid term.
func (t Terms) Validate() error {
	if err := order.ValidateText("name", t.Name, order.MaxNameRunes); err != nil {
		return err
	}
	if err := t.validateItems(); err != nil {
		return err
	}
	for _, b := range t.bounds() {
		if (b.value < b.min || b.value > b.max) && !(b.optional && b.value == 0) {
			return invalid(b.field, "must be a whole number%s from %d to %d", b.of, b.min, b.max)
		}
	}
	switch {
	case !t.OpensAt.IsZero() && !representable(t.OpensAt):
		return invalid("opens_at", "must be between the years 1970 and 9999")
	case !t.ClosesAt.IsZero() && !representable(t.ClosesAt):
		return invalid("closes_at", "must be between the years 1970 and 9999")
	case !t.OpensAt.IsZero() && !t.ClosesAt.IsZero() && !t.OpensAt.Before(t.ClosesAt):
		return invalid("closes_at", "must be later than opens_at")
	case t.PaymentWindow == 0 && t.PaymentGrace > 0:
		return invalid("payment_grace_seconds", "needs payment_window_seconds")
	case t.PaymentWindow == 0 && t.PaymentsPerSecond > 0:
		return invalid("payments_per_second", "needs payment_window_seconds")
	case t.Currency != "" && !order.IsCurrency(t.Currency):
		return invalid("currency", "must be a code of ISO 4217, such as EUR")
	case t.UnitPrice == 0 && t.Currency != "" && len(t.Items) == 0:
		return invalid("currency", "needs unit_price")
	case t.UnitPrice > 0 && t.Currency == "":
		return invalid("unit_price", "needs currency")
	}
	return nil
}

func invalid(field, format string, args ...any) error {
	return &order.InvalidError{Field: field, Reason: fmt.Sprintf(format, args...)}
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

// TermsView is the terms as JSON has them, and the columns of a sale: each has a member and a column of one name. Items
// stand apart, because some forms of a sale show more of them.
type TermsView struct {
	Name                 string        `json:"name"`
	Stock                int64         `json:"stock,omitzero"`
	PerOrderLimit        int64         `json:"per_order_limit"`
	OpensAt              order.Instant `json:"opens_at,omitzero"`
	ClosesAt             order.Instant `json:"closes_at,omitzero"`
	PaymentWindowSeconds int64         `json:"payment_window_seconds"`
	PaymentGraceSeconds  int64         `json:"payment_grace_seconds,omitzero"`
	PaymentsPerSecond    int64         `json:"payments_per_second,omitzero"`
	UnitPrice            zeronull.Int8 `json:"unit_price,omitzero"`
	Currency             zeronull.Text `json:"currency,omitzero"`
	Shards               int           `json:"shards"`
	// Waitlist has no column: a waiting list is a row of draws.
	Waitlist bool `json:"waitlist,omitzero" db:"-"`
}

// View returns the terms for JSON, or for columns.
func (t Terms) View() TermsView {
	return TermsView{
		Name: t.Name, Stock: t.Stock, PerOrderLimit: t.PerOrderLimit, OpensAt: order.Instant(t.OpensAt),
		ClosesAt: order.Instant(t.ClosesAt), PaymentWindowSeconds: inSeconds(t.PaymentWindow),
		PaymentGraceSeconds: inSeconds(t.PaymentGrace), PaymentsPerSecond: t.PaymentsPerSecond,
		UnitPrice: zeronull.Int8(t.UnitPrice), Currency: zeronull.Text(t.Currency), Shards: max(1, t.Shards),
		Waitlist: t.Waitlist,
	}
}

// Terms returns the terms that the view shows, with the items. They may be invalid.
func (v TermsView) Terms(items []Item) Terms {
	return Terms{
		Name: v.Name, Stock: v.Stock, Items: items, PerOrderLimit: v.PerOrderLimit, OpensAt: time.Time(v.OpensAt),
		ClosesAt: time.Time(v.ClosesAt), PaymentWindow: Seconds(v.PaymentWindowSeconds),
		PaymentGrace: Seconds(v.PaymentGraceSeconds), PaymentsPerSecond: v.PaymentsPerSecond,
		UnitPrice: int64(v.UnitPrice), Currency: string(v.Currency), Shards: v.Shards, Waitlist: v.Waitlist,
	}
}

// inSeconds returns a duration in seconds, or -1, which is out of bounds, if it has a fraction of one.
func inSeconds(d time.Duration) int64 {
	if d%time.Second != 0 {
		return -1
	}
	return int64(d / time.Second)
}

// Seconds returns n seconds, or a duration that is out of bounds if n is: the product could overflow.
func Seconds(n int64) time.Duration {
	return time.Duration(min(max(n, -1), inSeconds(order.MaxPaymentWindow)+1)) * time.Second
}
