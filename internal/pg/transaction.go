package pg

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/retry"
)

// ErrChangeUnknown is returned for a change in Postgres whose commit had no answer: it may have been made.
var ErrChangeUnknown = errors.New("the outcome of the change is unknown")

// InTransaction runs f in a transaction, which is read committed unless o says otherwise, and again after a conflict
// with another one. The error wraps ErrChangeUnknown if the commit got no answer; after any other error nothing was
// changed.
func InTransaction(ctx context.Context, on Transactor, o pgx.TxOptions, f func(pgx.Tx) error) error {
	if o == (pgx.TxOptions{}) {
		o.IsoLevel = pgx.ReadCommitted
	}
	return again(ctx, func() error {
		done := false
		err := pgx.BeginTxFunc(ctx, on, o, func(tx pgx.Tx) error {
			err := f(tx)
			done = err == nil
			return err
		})
		if done && err != nil && !errors.Is(err, pgx.ErrTxCommitRollback) && !isConflict(err) {
			return fmt.Errorf("%w: %w", ErrChangeUnknown, err)
		}
		return err
	})
}

// InOneStatement runs a statement that is its own transaction, and scans its only row. Its errors
// are those of InTransaction.
func InOneStatement(ctx context.Context, pool *pgxpool.Pool, into []any, statement string, args ...any) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	err = again(ctx, func() error { return conn.QueryRow(ctx, statement, args...).Scan(into...) })
	var refused *pgconn.PgError
	if err == nil || errors.Is(err, pgx.ErrNoRows) || errors.As(err, &refused) || pgconn.SafeToRetry(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrChangeUnknown, err)
}

// Delays between the tries of a transaction.
const (
	conflictTries    = 10
	conflictDelay    = 5 * time.Millisecond
	conflictDelayMax = 200 * time.Millisecond
)

// again repeats a transaction that Postgres has undone because of another one.
func again(ctx context.Context, transaction func() error) error {
	for try := 1; ; try++ {
		err := transaction()
		if !isConflict(err) || try == conflictTries ||
			!retry.Pause(retry.Delay(try, conflictDelay, conflictDelayMax), ctx.Done()) {
			return err
		}
	}
}

// isConflict reports whether Postgres has undone a transaction that would succeed without another one.
func isConflict(err error) bool {
	const serializationFailure, deadlockDetected = "40001", "40P01"
	refused, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (refused.Code == serializationFailure || refused.Code == deadlockDetected)
}

// Querier runs queries.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Transactor is a connection or a pool.
type Transactor interface {
	Querier
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}
