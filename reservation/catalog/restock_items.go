package catalog

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"

	"stampede/lua"
	"stampede/reservation"
	"stampede/reservation/order"
)

// RestockItems is Restock of items of a sale, by their codes: all are changed, or none. An item's stock may become 0,
// that of the sale may not. A *TakenError names the items that have too few left.
func (c *Catalog) RestockItems(
	ctx context.Context, id uuid.UUID, units map[string]int64, idempotencyKey string,
) (CountedSale, error) {
	var sum, moved int64
	for _, n := range units {
		if n == 0 || n < -order.MaxStock || n > order.MaxStock {
			return CountedSale{}, invalidItems("must each have 1 to %d units, or below zero to remove some", order.MaxStock)
		}
		sum, moved = sum+n, moved+max(n, -n)
	}
	if moved == 0 {
		return CountedSale{}, invalidItems("must be one or more")
	} else if max(sum, -sum) != moved {
		return CountedSale{}, invalidItems("must all be raised, or all be lowered")
	}
	return c.restockBy(ctx, id, sum, units, idempotencyKey)
}

func invalidItems(reason string, args ...any) error {
	return &order.InvalidError{Field: "items", Reason: fmt.Sprintf(reason, args...)}
}

// restocked returns the items of a sale with these units more.
func restocked(items []reservation.Item, units map[string]int64) ([]reservation.Item, error) {
	switch {
	case len(items) == 0:
		return nil, invalidItems("must be left out: the sale has none")
	case len(units) == 0:
		return nil, &order.InvalidError{Field: "units", Reason: "must be left out: the sale has items, each with its own"}
	}
	items = slices.Clone(items)
	for code, n := range units {
		item, err := itemOf(items, code)
		if err != nil {
			return nil, err
		}
		if item.Stock += n; item.Stock < 0 {
			return nil, invalidItems("must leave the stock of %s at 0 or above", code)
		}
	}
	return items, nil
}

// takenLines are the letters of items with the units that are taken. Unlike those of an order they may be 0, or many.
var takenLines = regexp.MustCompile(`^([a-zA-Z][0-9]+)+$`)

// restockItems changes the stock of items in Redis, as lower and apply need it: refused is nil if all were changed, and
// isLast is false if Redis has a later revision.
func (c *Catalog) restockItems(
	ctx context.Context, s reservation.Sale, ch publishedChange,
) (refused *TakenError, isLast bool, err error) {
	args := []any{s.Epoch, ch.Revision}
	for place, item := range s.Items {
		if units := ch.ItemUnits[item.Code]; units != 0 {
			args = append(args, order.ItemLetter(place), units, max(0, -units))
		}
	}
	key := c.store.Keys.Sale(s.Layout().Partition(0), s.ID)
	text, err := lua.RestockItems.Run(ctx, c.store.Redis, []string{key}, args...).Text()
	word, rest, _ := strings.Cut(text, " ")
	switch {
	case err != nil || word == "unchanged":
		return nil, false, err
	case word == "restocked":
		return nil, true, nil
	case word == "taken" && takenLines.MatchString(rest):
		taken := order.Lines(rest)
		return &TakenError{taken.Units(), taken.Named(s.Codes())}, true, nil
	}
	return nil, false, notRestocked(s.ID, text)
}
