package fulfillment

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/fulfillment/metrics"
	"stampede/internal/pg"
	"stampede/internal/retry"
)

const (
	// blockersInterval is how often a worker looks for sessions that block others.
	blockersInterval = time.Second
	// A blocking session of our role is ended after it has waited for its client for so long: in the
	// middle of a batch, and between two statements.
	silentInBatchMax      = 5 * time.Second
	silentBetweenQueryMax = 10 * time.Second
	// blockerNamedAfter is when a blocking session that is not ended is named in the log.
	blockerNamedAfter = 5 * time.Second
	// blockerForgottenAfter is how long a session that blocks no other is remembered.
	blockerForgottenAfter = 10 * time.Second
)

// Log texts about sessions that block others.
const (
	endedSession = "ended a database session that held a lock and whose client was silent"
	namedSession = "a database session holds a lock that other sessions wait for"
)

// endBlockers ends sessions of our role that block others while they wait for vanished clients,
// until ctx is done. A worker or an ingress whose machine has crashed or hangs leaves the row of a sale
// or of an order locked, and Postgres does not end a session in the middle of a batch. Nothing is
// lost: uncommitted work is redelivered.
func (w *Worker) endBlockers(ctx context.Context) {
	looking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepUnblock,
		"look for database sessions that block others")
	found := newBlockers(w.config.Pool, w.config.Logger)
	for retry.Pause(blockersInterval, ctx.Done()) {
		ended, err := found.endSilent(ctx)
		w.metrics.EndedSessions.Add(float64(ended))
		if ctx.Err() != nil {
			return
		}
		looking.Note(err)
	}
}

// blockerKey changes as soon as the session receives something from its client.
type blockerKey struct {
	pid                         int32
	started, queried, changedAt int64
}

func newBlockerKey(b *pg.Activity) blockerKey {
	return blockerKey{
		b.PID, b.BackendStart.UnixMicro(), time.Time(b.QueryStart).UnixMicro(), time.Time(b.StateChange).UnixMicro(),
	}
}

// blockers holds the sessions that blocked others within blockerForgottenAfter.
type blockers struct {
	pool *pgxpool.Pool
	log  *slog.Logger
	seen map[blockerKey]*blockerSeen
}

func newBlockers(pool *pgxpool.Pool, log *slog.Logger) *blockers {
	return &blockers{pool, log, make(map[blockerKey]*blockerSeen)}
}

// blockerSeen is when a session was seen. silent is when it was first seen waiting for its client.
type blockerSeen struct {
	first, last, silent time.Time
	named               bool
}

// endSilent ends the blocking sessions that were silent for too long, and returns their number.
func (l *blockers) endSilent(ctx context.Context) (ended int, err error) {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, err := pg.Blockers(ctx, l.pool)
	if err != nil {
		return 0, err
	}
	now := time.Now()
	for _, b := range found {
		seen := l.note(&b, now)
		switch {
		case seen.silent.IsZero() || now.Sub(seen.silent) < silentMax(&b):
			l.name(&b, seen)
		default:
			gone, err := l.end(ctx, &b, now.Sub(seen.silent))
			if err != nil {
				return ended, err
			}
			if gone {
				ended++
			}
		}
	}
	for key, seen := range l.seen {
		if now.Sub(seen.last) > blockerForgottenAfter {
			delete(l.seen, key)
		}
	}
	return ended, nil
}

func (l *blockers) note(b *pg.Activity, now time.Time) *blockerSeen {
	seen, known := l.seen[newBlockerKey(b)]
	if !known {
		seen = &blockerSeen{first: now}
		l.seen[newBlockerKey(b)] = seen
	}
	seen.last = now
	if b.Silent && seen.silent.IsZero() {
		seen.silent = now
	}
	return seen
}

func silentMax(b *pg.Activity) time.Duration {
	if b.State == "active" {
		return silentInBatchMax
	}
	return silentBetweenQueryMax
}

// name logs, once, a session that blocks others for blockerNamedAfter.
func (l *blockers) name(b *pg.Activity, seen *blockerSeen) {
	if waited := seen.last.Sub(seen.first); !seen.named && waited >= blockerNamedAfter {
		seen.named = true
		l.log.Warn(namedSession, append(attributes(b), "others_wait_for", waited)...)
	}
}

func (l *blockers) end(ctx context.Context, b *pg.Activity, silent time.Duration) (gone bool, err error) {
	gone, err = b.Terminate(ctx, l.pool)
	if gone {
		l.log.Warn(endedSession, append(attributes(b), "silent_for", silent)...)
	}
	return gone, err
}

func attributes(b *pg.Activity) []any {
	return []any{
		"pid", b.PID, "application", b.Application, "client", b.Client, "role", b.Role, "state", b.State,
		"transaction_began", time.Time(b.XactStart), "query_began", time.Time(b.QueryStart), "query", b.Query,
	}
}
