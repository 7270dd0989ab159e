package pg

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/sql"
)

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
