package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// InSnapshot runs a transaction that sees Postgres at one moment. The lock comes before the first look, at which
// the moment is fixed: to a snapshot from before a swap, rows of the new table would be missing.
func InSnapshot(ctx context.Context, on Transactor, do func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, on, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "LOCK TABLE orders IN ACCESS SHARE MODE"); err != nil {
			return err
		}
		return do(tx)
	})
}
