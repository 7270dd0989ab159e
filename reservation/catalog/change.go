package catalog

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrChangeUnknown is returned for a change in Postgres whose commit had no answer: it may have been made.
var ErrChangeUnknown = errors.New("the outcome of the change is unknown")

// InTransaction runs f in a transaction. The error wraps ErrChangeUnknown if the commit got no
// answer; after any other error nothing was changed.
func InTransaction(ctx context.Context, pool *pgxpool.Pool, o pgx.TxOptions, f func(pgx.Tx) error) error {
	done := false
	err := pgx.BeginTxFunc(ctx, pool, o, func(tx pgx.Tx) error {
		err := f(tx)
		done = err == nil
		return err
	})
	if done && err != nil && !errors.Is(err, pgx.ErrTxCommitRollback) {
		return fmt.Errorf("%w: %w", ErrChangeUnknown, err)
	}
	return err
}

// inOneStatement runs a statement that is its own transaction, and scans its only row. Its errors
// are those of InTransaction.
func inOneStatement(ctx context.Context, pool *pgxpool.Pool, into []any, statement string, args ...any) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	var refused *pgconn.PgError
	err = conn.QueryRow(ctx, statement, args...).Scan(into...)
	if err == nil || errors.Is(err, pgx.ErrNoRows) || errors.As(err, &refused) || pgconn.SafeToRetry(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrChangeUnknown, err)
}
