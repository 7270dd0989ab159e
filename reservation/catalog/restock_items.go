package catalog

import (
	"context"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// RestockItems adds units to items of a sale, or removes some.
func (c *Catalog) RestockItems(
	context.Context, uuid.UUID, map[string]int64, string,
) (CountedSale, error) {
	return CountedSale{}, &order.InvalidError{Field: "items", Reason: "cannot be restocked yet"}
}
