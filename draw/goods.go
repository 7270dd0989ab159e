package draw

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Goods are the units that are drawn as they were when the list was frozen. A draw of version 1 does not publish them.
type Goods struct {
	// Revision is that of the sale, as of which this is true.
	Revision int64 `json:"revision"`
	Stock    int64 `json:"stock"`
	// Sold are the units of live orders: they are from before the draw, and no offers.
	Sold  int64  `json:"sold,omitzero"`
	Items []Item `json:"items,omitempty"`
	// Holders are the places of those entrants who have such an order. Nobody else can be skipped for one.
	Holders []Place `json:"holders,omitempty"`
}

// Place is a place in the list.
type Place int64

// Restock is a change of the stock after the list was frozen.
type Restock struct {
	// Revision is that of the sale which the change made.
	Revision int64     `json:"revision"`
	At       time.Time `json:"at"`
	// Stock, and that of the Items, is the one from then on.
	Stock int64  `json:"stock"`
	Items []Item `json:"items,omitempty"`
}

func (r *Restock) stock() string { return stockText(r.Stock, r.Items) }

func stockText(stock int64, items []Item) string {
	text := fmt.Sprintf("%d units", stock)
	if len(items) == 0 {
		return text
	}
	var each []string
	for _, item := range items {
		each = append(each, fmt.Sprintf("%q %d", item.Code, item.Stock))
	}
	return fmt.Sprintf("%s (%s)", text, strings.Join(each, ", "))
}

// stockFault returns what is wrong with the stock: it must be that of the freeze and of each change since.
func (b *Bundle) stockFault() string {
	if b.Goods == nil {
		return ""
	}
	before := Restock{Revision: b.Goods.Revision, Stock: b.Goods.Stock, Items: b.Goods.Items}
	for _, next := range b.Restocks {
		switch {
		case next.Revision <= before.Revision || next.Revision > b.Revision:
			return fmt.Sprintf("a change of the stock has revision %d, after %d and in a bundle of revision %d", next.Revision,
				before.Revision, b.Revision)
		case !slices.EqualFunc(before.Items, next.Items, func(a, b Item) bool { return a.Code == b.Code }):
			return fmt.Sprintf("a change of the stock to %s has other items than %s", next.stock(), before.stock())
		}
		before = next
	}
	if now := stockText(b.Stock, b.Items); before.stock() != now {
		return fmt.Sprintf("it has %s, and no change of the stock leads there from %s", now, before.stock())
	}
	sum := b.Stock
	for _, item := range b.Items {
		sum -= item.Stock
	}
	if len(b.Items) > 0 && sum != 0 {
		return fmt.Sprintf("it has %s, which is not their sum", before.stock())
	}
	return ""
}

// checkUnits checks that each unit was offered, or that no entrant is left for it.
func (v *verifier) checkUnits() Check {
	const name = "units"
	if fault := v.stockFault(); fault != "" {
		return Check{name, Broken, fault}
	}
	if v.seed == nil {
		return checked(name, Unknown, "not checked without the seed")
	}
	turns, offered := map[string]int64{}, map[string]int64{}
	for _, o := range v.Offers {
		if turns[o.Item]++; o.Outcome == Offered {
			offered[o.Item]++
		}
	}
	items := v.Items
	if len(items) == 0 {
		items = []Item{{Stock: v.Stock}}
	}
	waiting := int64(0)
	for i, item := range items {
		units := item.Stock - v.soldBefore(i)
		waiting += max(0, min(units-offered[item.Code], v.entries[v.letters[item.Code]]-turns[item.Code]))
	}
	if waiting > 0 {
		return checked(name, Unknown, "of %s, %d were not offered, and entrants are left for them: the draw goes on, or "+
			"they are withheld", stockText(v.Stock, v.Items), waiting)
	}
	return checked(name, Kept, "%s: each was offered, or no entrant is left for it", stockText(v.Stock, v.Items))
}

// soldBefore are the units of an item, or of a sale without items, that were sold before the draw.
func (b *Bundle) soldBefore(item int) int64 {
	switch {
	case b.Goods == nil:
		return 0
	case item < len(b.Goods.Items):
		return b.Goods.Items[item].Sold
	}
	return b.Goods.Sold
}
