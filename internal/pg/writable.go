package pg

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrReadOnly is returned for a Postgres that takes no writes: a standby, or one whose administrator or provider has
// set default_transaction_read_only. It is an outage that ends without us.
var ErrReadOnly = errors.New("the server of Postgres takes no writes (stampede doctor says why)")

// Writable returns nil if Postgres answers and takes writes. The error is ErrReadOnly, or the error of the query.
func Writable(ctx context.Context, pool *pgxpool.Pool) error {
	var readOnly bool
	err := pool.QueryRow(ctx, "SELECT current_setting('transaction_read_only')::boolean").Scan(&readOnly)
	if err == nil && readOnly {
		err = ErrReadOnly
	}
	return err
}
