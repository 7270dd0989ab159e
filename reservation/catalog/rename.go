package catalog

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/reservation"
	"stampede/reservation/order"
)

// Names are new names of a sale, and of its items by their codes. What is not in them keeps its name.
type Names struct {
	Sale  *string           `json:"name,omitempty"`
	Items map[string]string `json:"items,omitempty"`
}

// UnknownItemError is returned for an item that the sale does not have. It is an *InvalidError as well.
type UnknownItemError struct{ Code string }

func (e *UnknownItemError) Error() string { return e.Unwrap().Error() }

// Unwrap returns the *InvalidError.
func (e *UnknownItemError) Unwrap() error {
	return invalidItems("must be those of the sale: it has no %q", e.Code)
}

// itemOf returns the item with the code, to be changed, or an *UnknownItemError.
func itemOf(items []reservation.Item, code string) (*reservation.Item, error) {
	for place := range items {
		if items[place].Code == code {
			return &items[place], nil
		}
	}
	return nil, &UnknownItemError{code}
}

// Rename changes the names of a sale and of its items. A repeat changes nothing.
func (c *Catalog) Rename(ctx context.Context, id uuid.UUID, to Names) (CountedSale, error) {
	if err := to.validate(); err != nil {
		return CountedSale{}, err
	}
	next := func(_ context.Context, _ pgx.Tx, s reservation.Sale) (saleChange, error) {
		if s.StateAt(time.Now()) == reservation.StateEnded {
			return saleChange{}, &reservation.IllegalTransitionError{Action: "rename", State: reservation.StateEnded}
		}
		data := map[string]any{}
		if to.Sale != nil && *to.Sale != s.Name {
			data["name"], data["previous_name"] = *to.Sale, s.Name
		}
		items, err := to.renamed(s.Items)
		switch {
		case err != nil:
			return saleChange{}, err
		case !slices.Equal(items, s.Items):
			data["items"], data["item_names"] = items, to.Items
		case len(data) == 0:
			return saleChange{}, nil
		}
		return saleChange{eventRenamed, s.State, s.Stock, data}, nil
	}
	list := func(_ context.Context, _ pgx.Tx, s reservation.Sale) (saleChange, error) {
		if to.Sale == nil || s.Name == listName(*to.Sale) {
			return saleChange{}, nil
		}
		data := map[string]any{"name": listName(*to.Sale), "previous_name": s.Name}
		return saleChange{eventRenamed, s.State, s.Stock, data}, nil
	}
	if _, err := c.change(ctx, id, OpRename, "", next, list); err != nil {
		return CountedSale{}, err
	}
	return c.publishAndShow(ctx, id, OpRename, ErrNotInForce)
}

// validate returns an *InvalidError for names that no sale or item can have, and for none.
func (n Names) validate() error {
	switch {
	case n.Sale == nil && n.Items == nil:
		return &order.InvalidError{Field: "name", Reason: "must be given, or items with names by their codes"}
	case n.Sale != nil:
		if err := order.ValidateText("name", *n.Sale, order.MaxNameRunes); err != nil {
			return err
		}
	}
	if _, empty := n.Items[""]; empty || n.Items != nil && len(n.Items) == 0 {
		return invalidItems("must be one or more, each with its code")
	}
	for _, code := range slices.Sorted(maps.Keys(n.Items)) {
		if err := order.ValidateText("the name of an item", n.Items[code], order.MaxNameRunes); err != nil {
			return err
		}
	}
	return nil
}

// renamed returns the items of a sale with their new names.
func (n Names) renamed(items []reservation.Item) ([]reservation.Item, error) {
	if len(items) == 0 && n.Items != nil {
		return nil, invalidItems("must be left out: the sale has none, rename it by its name")
	}
	items = slices.Clone(items)
	for _, code := range slices.Sorted(maps.Keys(n.Items)) {
		item, err := itemOf(items, code)
		if err != nil {
			return nil, err
		}
		item.Name = n.Items[code]
	}
	return items, nil
}
