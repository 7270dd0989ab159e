package catalog

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
)

// Page is a page of sales as Postgres had them, newest first. It is never changed.
type Page struct{ sales []storedSale }

// ReadPage returns at most limit sales, newest first. It reads no order, so it costs the same however many there are:
// CountPage sums all paid orders of sales with a payment window. The error wraps ErrUnavailable.
func (c *Catalog) ReadPage(ctx context.Context, limit int) (Page, error) {
	found, err := findSales(ctx, c.pool, nil, nil, limit, false)
	if err != nil {
		return Page{}, fmt.Errorf("%w: find sales: %w", reservation.ErrUnavailable, err)
	}
	return Page{found}, nil
}

// Sales returns the sales of the page without the count of their units.
func (p Page) Sales() []CountedSale {
	now := time.Now()
	sales := make([]CountedSale, len(p.sales))
	for i, s := range p.sales {
		sales[i] = CountedSale{Sale: s.Sale, State: s.StateAt(now), Retired: s.retired, Archived: s.archived}
	}
	return sales
}

// AwaitsPayment is true for a sale whose orders are final only when they are paid, and whose paid units the caller of
// CountPageOf has to know.
func (s CountedSale) AwaitsPayment() bool { return s.PaymentWindow > 0 && !s.Archived }

// CountPageOf asks Redis for the units of the sales of a page, and returns them in its order. Paid are the paid
// units of the sales that await payments, as of before the call. Postgres is not asked. The error wraps
// ErrUnavailable, and so does that of a single sale that requires a rebuild.
func (c *Catalog) CountPageOf(ctx context.Context, p Page, paid map[uuid.UUID]int64) ([]CountResult, error) {
	sales := make([]storedSale, len(p.sales))
	for i, s := range p.sales {
		s.final = s.Sold
		if (CountedSale{Sale: s.Sale, Archived: s.archived}).AwaitsPayment() {
			s.final = paid[s.ID]
		}
		sales[i] = s
	}
	if len(sales) == 0 {
		return nil, nil
	}
	counted, err := c.count(ctx, sales)
	if err != nil {
		return nil, fmt.Errorf("%w: count sales: %w", reservation.ErrUnavailable, err)
	}
	return counted, nil
}
