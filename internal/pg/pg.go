// Package pg works with sessions of Postgres: sessions outside the pool that hold an advisory lock, and sessions that
// block others.
package pg

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/clocks"
	"stampede/internal/retry"
	"stampede/sql"
)

// Lock is the number of an advisory lock. Each database has its own locks.
type Lock int64

// All advisory locks are listed here, so that no two have the same number.
const (
	// ProjectionLock is held by a rebuild of the projections.
	ProjectionLock Lock = 5_077_217_436
	// ReconcileLock is held by a reconcile.
	ReconcileLock Lock = 5_077_217_437
	// RetireLock is held by the worker that retires sales.
	RetireLock Lock = 5_077_217_438
	// ArchiveLock is held by a command that archives sales, or brings one back.
	ArchiveLock Lock = 5_077_217_439
	// firstPartitionLock is the lock of partition 0.
	firstPartitionLock Lock = 5_077_217_500
)

// PartitionLock is held by a rebuild of Redis in that partition.
func PartitionLock(partition int) Lock { return firstPartitionLock + Lock(partition) }

// DrawLock is held by the worker that freezes and ranks the draw of a sale. Its number is far above all others.
func DrawLock(sale uuid.UUID) Lock { return Lock(binary.BigEndian.Uint64(sale[8:]) >> 1) }

// ErrLockHeld is returned while another session holds the lock.
var ErrLockHeld = errors.New("another session holds the advisory lock")

// endTimeout bounds the end of a session.
const endTimeout = time.Second

// Session is a connection outside the pool. Its settings, temporary tables and locks end with it. It serves one
// goroutine at a time.
type Session struct{ *pgx.Conn }

// Begin takes a connection out of the pool and acquires the lock. It does not wait for the lock: if another session
// holds it, Begin returns ErrLockHeld. The caller must call End.
//
// Postgres ends the session if it is idle for longer than silence, so that the lock becomes free if the client hangs or
// its machine vanishes. Its transactions have no limit then. With silence 0 the settings are those of the pool.
func Begin(ctx context.Context, pool *pgxpool.Pool, lock Lock, silence time.Duration) (Session, error) {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return Session{}, err
	}
	s := Session{pooled.Hijack()}
	var limit string
	if silence > 0 {
		limit = fmt.Sprintf("%dms", silence.Milliseconds())
	}
	var taken bool
	var settings int
	err = s.QueryRow(ctx, sql.PGTryLock, lock, zeronull.Text(limit)).Scan(&taken, &settings)
	if err == nil && !taken {
		err = ErrLockHeld
	}
	if err != nil {
		s.End()
		return Session{}, err
	}
	return s, nil
}

// Run runs several statements without parameters in one round trip.
func (s Session) Run(ctx context.Context, statements string) error {
	return Run(ctx, s.Conn, statements)
}

// Run runs several statements without parameters in one round trip.
func Run(ctx context.Context, conn *pgx.Conn, statements string) error {
	_, err := conn.PgConn().Exec(ctx, statements).ReadAll()
	return err
}

// End unlocks and closes the session, within a second. Closing alone is not enough: the server may end a closed session
// later.
func (s Session) End() {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	_, _ = s.Exec(ctx, "SELECT pg_advisory_unlock_all()")
	_ = s.Close(ctx)
}

// Activity describes a session. For a session of another role Postgres shows little more than the PID.
type Activity struct {
	PID          int32
	BackendStart time.Time
	QueryStart   zeronull.Timestamptz
	StateChange  zeronull.Timestamptz
	XactStart    zeronull.Timestamptz
	Role         string
	Application  string
	Client       string
	State        string
	Query        string
	// Silent is true for a session of the same role that waits for its client within a transaction.
	Silent bool
}

// Blockers returns the sessions that block others of the same role by their locks.
func Blockers(ctx context.Context, pool *pgxpool.Pool) ([]Activity, error) {
	rows, _ := pool.Query(ctx, sql.PGFindBlockers) // its error comes with the rows
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Activity])
	if err != nil {
		return nil, fmt.Errorf("find blocking sessions: %w", err)
	}
	return found, nil
}

// Holder returns the session that holds a lock alone, or pgx.ErrNoRows if none does.
func Holder(ctx context.Context, pool *pgxpool.Pool, lock Lock) (Activity, error) {
	rows, _ := pool.Query(ctx, sql.PGLockHolder, lock) // its error comes with the rows
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Activity])
}

// Terminate ends the session, unless its client has sent something since a was read. It returns whether it was ended.
func (a *Activity) Terminate(ctx context.Context, pool *pgxpool.Pool) (ended bool, err error) {
	err = pool.QueryRow(ctx, sql.PGEndSession, a.PID, a.BackendStart, a.QueryStart, a.StateChange).Scan(&ended)
	if err != nil {
		return false, fmt.Errorf("end session %d of %q at %q: %w", a.PID, a.Application, a.Client, err)
	}
	return ended, nil
}

// String describes the session for a log.
func (a *Activity) String() string {
	text := fmt.Sprintf("session %d (application %q, client %q, role %q, %s", a.PID, a.Application, a.Client, a.Role,
		a.State)
	if began := time.Time(a.XactStart); !began.IsZero() {
		text += ", in a transaction since " + began.UTC().Format(time.RFC3339)
	}
	return text + fmt.Sprintf("): %.100q", a.Query)
}

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

// ScannedPage returns the rows of a page: of those that a query looked at, at most limit that match. The query numbers
// what it looks at, at most scan rows, and has returned one more match than limit if there are more. last is the row
// after which the next page begins, or nil at the end: a page may be short, or empty, and not be the last.
func ScannedPage[R any](rows []R, limit, scan int, look func(*R) (n int, matches bool)) (page []R, last *R) {
	for i := range rows {
		n, matches := look(&rows[i])
		switch {
		case len(page) == limit:
			return page, &page[limit-1]
		case matches:
			page = append(page, rows[i])
		}
		if n == scan {
			return page, &rows[i]
		}
	}
	return page, nil
}

// ReadClock reads the clock of Postgres.
func ReadClock(ctx context.Context, on Querier) (clocks.Reading, error) {
	return clocks.Read(func() (time.Time, error) {
		rows, _ := on.Query(ctx, "SELECT clock_timestamp()") // its error comes with the row
		return pgx.CollectExactlyOneRow(rows, pgx.RowTo[time.Time])
	})
}
