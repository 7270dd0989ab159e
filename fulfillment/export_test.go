package fulfillment

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	EndedSession          = endedSession
	NamedSession          = namedSession
	SilentBetweenQueryMax = silentBetweenQueryMax
)

var PauseAfter = pauseAfter

type Blockers = blockers

func NewBlockers(pool *pgxpool.Pool, log *slog.Logger) *Blockers { return newBlockers(pool, log) }

func (l *blockers) EndSilent(ctx context.Context) (ended int, err error) { return l.endSilent(ctx) }

// Seen returns the number of remembered sessions.
func (l *blockers) Seen() int { return len(l.seen) }

// Pass makes the sessions look as if they had been seen earlier by d.
func (l *blockers) Pass(d time.Duration) {
	for _, seen := range l.seen {
		seen.first = seen.first.Add(-d)
		if !seen.silent.IsZero() {
			seen.silent = seen.silent.Add(-d)
		}
	}
}
