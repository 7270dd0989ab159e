package fulfillment

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/fulfillment/metrics"
	"stampede/internal/pause"
	"stampede/internal/pg"
	"stampede/internal/retry"
)

const (
	// blockersInterval is how often a worker looks for sessions that hold up others.
	blockersInterval = time.Second
	// A session of our role that others wait for is ended when it has waited for its client for so long: in the middle of
	// a batch, of which the rest should be there already, and between two statements.
	silentInBatchMax      = 5 * time.Second
	silentBetweenQueryMax = 10 * time.Second
	// blockerNamedAfter is when a session is named in the log that others wait for and that is not to be ended.
	blockerNamedAfter = 5 * time.Second
	// blockerForgottenAfter is how long nobody may wait for a session until it is forgotten.
	blockerForgottenAfter = 10 * time.Second
)

// What the log says of sessions that hold up others.
const (
	endedSession = "ended a database session that held a lock and did not hear from its client"
	namedSession = "a database session holds a lock for which others wait"
)

// endBlockers ends sessions of our role that hold up others while they wait for clients that have vanished, until ctx
// ends. A worker or an ingress whose machine is gone, or which stands still, leaves the row of a sale or of an order
// locked; Postgres itself does not end a session in the middle of a batch. Nothing is lost with such a session,
// because everything may happen twice: what it did not commit is delivered again.
func (w *Worker) endBlockers(ctx context.Context) {
	looking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepUnblock,
		"look for database sessions that hold up others")
	found := blockers{Pool: w.config.Pool, Log: w.config.Logger, Seen: make(map[blockerKey]*blockerSeen)}
	for pause.For(blockersInterval, ctx.Done()) {
		ended, err := found.Look(ctx)
		w.metrics.EndedSessions.Add(float64(ended))
		if ctx.Err() != nil {
			return
		}
		looking.Note(err)
	}
}

// blockerKey is another one as soon as the session has heard from its client.
type blockerKey struct {
	pid                         int32
	started, queried, changedAt int64
}

func keyOf(b *pg.Activity) blockerKey {
	return blockerKey{
		b.PID, b.BackendStart.UnixMicro(), time.Time(b.QueryStart).UnixMicro(), time.Time(b.StateChange).UnixMicro(),
	}
}

// blockers is what is known of sessions that hold up others. It has as many entries as there were such sessions in the
// last moments.
type blockers struct {
	Pool *pgxpool.Pool
	Log  *slog.Logger
	Seen map[blockerKey]*blockerSeen
}

// blockerSeen is when a session was seen. silent is when it was first seen to wait for its client:
// it has not heard from it since, or its key would be another one.
type blockerSeen struct {
	First, last, Silent time.Time
	named               bool
}

// Look ends the sessions whose time is over, and returns how many.
func (l *blockers) Look(ctx context.Context) (ended int, err error) {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, err := pg.Blockers(ctx, l.Pool)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	for _, b := range found {
		seen := l.note(&b, now)
		switch {
		case seen.Silent.IsZero() || now.Sub(seen.Silent) < silentMax(&b):
			l.name(&b, seen)
		default:
			gone, err := l.end(ctx, &b, now.Sub(seen.Silent))
			if err != nil {
				return ended, err
			}
			if gone {
				ended++
			}
		}
	}
	for key, seen := range l.Seen {
		if now.Sub(seen.last) > blockerForgottenAfter {
			delete(l.Seen, key)
		}
	}
	return ended, nil
}

func (l *blockers) note(b *pg.Activity, now time.Time) *blockerSeen {
	seen, known := l.Seen[keyOf(b)]
	if !known {
		seen = &blockerSeen{First: now}
		l.Seen[keyOf(b)] = seen
	}
	seen.last = now
	if b.Silent && seen.Silent.IsZero() {
		seen.Silent = now
	}
	return seen
}

func silentMax(b *pg.Activity) time.Duration {
	if b.State == "active" {
		return silentInBatchMax
	}
	return silentBetweenQueryMax
}

// name names a session once that goes on holding up others.
func (l *blockers) name(b *pg.Activity, seen *blockerSeen) {
	if waited := seen.last.Sub(seen.First); !seen.named && waited >= blockerNamedAfter {
		seen.named = true
		l.Log.Warn(namedSession, append(attributes(b), "others_wait_for", waited)...)
	}
}

func (l *blockers) end(ctx context.Context, b *pg.Activity, silent time.Duration) (gone bool, err error) {
	gone, err = b.Terminate(ctx, l.Pool)
	if gone {
		l.Log.Warn(endedSession, append(attributes(b), "silent_for", silent)...)
	}
	return gone, err
}

func attributes(b *pg.Activity) []any {
	return []any{
		"pid", b.PID, "application", b.Application, "client", b.Client, "role", b.Role, "state", b.State,
		"transaction_began", time.Time(b.XactStart), "query_began", time.Time(b.QueryStart), "query", b.Query,
	}
}
