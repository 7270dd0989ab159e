package catalog

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation"
	"stampede/sql"
)

// SaleFilter selects sales. Zero members select all.
type SaleFilter struct {
	// Name is a part of the name, in any case.
	Name string
	// State is scheduled, open, paused or ended.
	State reservation.State
}

// FoundSale is what Postgres says of a sale that was searched.
type FoundSale struct {
	ID   uuid.UUID
	Name string
	// State is the one for a buyer.
	State reservation.State
}

// searchMax bounds the sales that a search looks at: no index has them by a part of their names.
const searchMax = 5000

// Search returns at most limit sales that match, newest first, and only those older than after unless that is uuid.Nil.
// next is where the next page begins, or uuid.Nil at the end: a page may be short, or empty, and not be the last.
func (c *Catalog) Search(
	ctx context.Context, f SaleFilter, after uuid.UUID, limit int,
) (sales []FoundSale, next uuid.UUID, err error) {
	look := limit + 1
	if f != (SaleFilter{}) {
		look = max(searchMax, look)
	}
	rows, _ := c.pool.Query(ctx, sql.CatalogSearchSales, f.Name, zeronull.Text(f.State), zeronull.UUID(after), look,
		limit+1) // rows carry the error
	type looked struct {
		FoundSale
		Matches bool
		N       int
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[looked])
	if err != nil {
		return nil, uuid.Nil, fmt.Errorf("%w: search sales: %w", reservation.ErrUnavailable, err)
	}
	page, last := pg.ScannedPage(all, limit, look, func(row *looked) (int, bool) { return row.N, row.Matches })
	for i := range page {
		sales = append(sales, page[i].FoundSale)
	}
	if last != nil {
		next = last.ID
	}
	return sales, next, nil
}
