package pg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Querier runs queries.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Transactor is a connection or a pool.
type Transactor interface {
	Querier
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}
