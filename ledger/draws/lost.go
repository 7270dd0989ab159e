package draws

import (
	"context"

	"github.com/jackc/pgx/v5"

	"stampede/sql"
)

// lost returns turns of the item of t whose offers were recorded, and whose orders were lost with Redis before Postgres
// had them: at most so many, by rank. A rebuild of the stock in Redis records all that it finds, so an order of an
// earlier epoch that is not in Postgres is void for ever. An order that is cancelled or has expired is not lost.
func (d *Draw) lost(ctx context.Context, tx pgx.Tx, t Turn, most int64) (turns []Turn, err error) {
	if d.offersEpoch == d.epoch || most <= 0 {
		return nil, nil
	}
	rows, _ := tx.Query(ctx, sql.DrawsLost, d.SaleID, d.EntriesID, t.Item, d.epoch, most) // rows carry the error
	_, err = pgx.ForEachRow(rows, []any{&t.Rank, &t.Place, &t.EntryID, &t.UserID, &t.Cancelled}, func() error {
		t.OrderID = d.orderID(t.EntryID)
		turns = append(turns, t)
		return nil
	})
	return turns, err
}
