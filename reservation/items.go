package reservation

import (
	"context"
	"fmt"
	"slices"

	"stampede/reservation/order"
)

// errWrongItems: the sale in Redis has other items than its seller knows, which a damaged sale may have.
var errWrongItems = fmt.Errorf("%w: its items have changed", ErrUnavailable)

// reserveItems is reserve for a request for items, or of a sale with items.
func (q *queue) reserveItems(ctx context.Context, r Request, arrived int64) (answer Answer, err error) {
	codes := q.place.codes
	switch {
	case codes == nil:
		return Answer{}, &order.InvalidError{Field: "items", Reason: "must be left out: the sale has none"}
	case r.Items == nil:
		such := `must say how many of which, such as {"` + codes[0] + `":1}`
		return Answer{}, &order.InvalidError{Field: "items", Reason: such}
	}
	var all [order.MaxItems]int64
	wanted := all[:len(codes)]
	var unknown []string
	for code, n := range r.Items {
		if n < 1 {
			return Answer{}, &order.InvalidError{Field: "items", Reason: "must have at least 1 unit of each item"}
		}
		if place := slices.Index(codes, code); place >= 0 {
			wanted[place] = min(n, order.MaxPerOrder+1) // as in newCall
			r.Quantity += wanted[place]
		} else {
			unknown = append(unknown, code)
		}
	}
	if unknown != nil {
		slices.Sort(unknown)
		return Answer{Verdict: UnknownItem, Of: &OfItems{Codes: unknown}}, nil
	}
	if answer, soldOut := q.remembersSoldOutItems(r.User, wanted); soldOut {
		return answer, nil
	}
	err = q.reserve(ctx, &r, order.MakeLines(wanted), arrived, &answer)
	return answer, err
}

func (r *Request) validateItems() error {
	switch {
	case r.Items != nil && r.Quantity != 0:
		return &order.InvalidError{Field: "items", Reason: "must not come with a quantity"}
	case r.Items != nil && len(r.Items) == 0:
		return &order.InvalidError{Field: "items", Reason: "must have at least one item"}
	}
	return nil
}

// nameItems adds what a call's answer says of items, with their codes. Short are the items that fewer units are left of
// than requested, or that are offered, with what is left, and left that of all items. It returns true if nothing is
// left of one of the first kind.
func (c *call) nameItems(codes []string, short order.Lines, left order.Items) (soldOut bool) {
	of := OfItems{Units: c.answer.Reservation.Lines.Named(codes)}
	switch c.answer.Verdict {
	case SoldOut:
		of.Units = left
		for place, units := range short.Each() {
			of.Codes = append(of.Codes, codes[place])
			soldOut = soldOut || units == 0
		}
	case OffersOnly:
		for place := range short.Each() {
			of.Codes = append(of.Codes, codes[place])
		}
	case OverLimit:
		if _, lines, _ := order.ParseUnits(string(short)); lines != "" {
			for place := range lines.Each() {
				of.Codes = append(of.Codes, codes[place])
			}
		}
	}
	if of.Units != "" || of.Codes != nil {
		c.answer.Of = &of
	}
	return soldOut
}
