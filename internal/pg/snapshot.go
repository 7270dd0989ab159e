package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// InSnapshot runs a transaction with one snapshot of Postgres. It locks the table orders before the first query, which
// fixes the snapshot: a snapshot from before a swap would not see the rows of the new table.
func InSnapshot(ctx context.Context, on Transactor, do func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, on, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "LOCK TABLE orders IN ACCESS SHARE MODE"); err != nil {
			return err
		}
		return do(tx)
	})
}
