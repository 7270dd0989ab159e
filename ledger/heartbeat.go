package ledger

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/retry"
	"stampede/sql"
)

const (
	// heartbeatInterval is how often an ingress records that it runs. An order is overdue at the first
	// heartbeat after its deadline, so payments are accepted for at most this much longer.
	heartbeatInterval = time.Second
	// heartbeatTimeout bounds a heartbeat, which may wait for the row lock of another one.
	heartbeatTimeout = 5 * time.Second
)

// Heartbeat records in Postgres that an ingress runs, so that buyers can pay. Every ingress runs one.
// After an outage of all ingresses or of Postgres, the first heartbeat postpones the deadlines by the
// length of the outage. Deadlines move with the clock of Postgres if that is set.
type Heartbeat struct {
	Pool   *pgxpool.Pool
	Logger *slog.Logger
}

// Run sends a heartbeat once a second until ctx is done, and then returns nil. It retries while Postgres is
// down.
func (h Heartbeat) Run(ctx context.Context) error {
	sending := retry.Outage{Log: h.Logger, Doing: "record a heartbeat in Postgres"}
	turns := movedTurns{pool: h.Pool}
	for {
		lasted, err := h.Send(ctx)
		if err == nil {
			err = turns.move(ctx, lasted)
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // a stop is no failure
		}
		sending.Note(err)
		switch {
		case lasted > 0: // a clock that was set forward looks the same
			h.Logger.Warn("buyers could not pay for a while: deadlines are postponed", "outage", lasted)
		case lasted < 0:
			h.Logger.Warn("the clock of Postgres was set back: deadlines move with it", "outage", lasted)
		}
		if !retry.Pause(heartbeatInterval, ctx.Done()) {
			return nil
		}
	}
}

// Send records a heartbeat. It returns the length of the outage that it ended, or 0; below 0 if the clock of Postgres
// was set back.
func (h Heartbeat) Send(ctx context.Context) (lasted time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	var seconds float64
	if err := h.Pool.QueryRow(ctx, sql.LedgerHeartbeat).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("heartbeat: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// turnsMax bounds the turns to pay that are moved at each heartbeat after an outage.
const turnsMax = 5000

// movedTurns moves the turns to pay that are written with the orders after an outage, a part at each heartbeat.
type movedTurns struct {
	pool *pgxpool.Pool
	// since is when the last outage was over, zero if nothing is left to move, and lasted how long it was.
	since  time.Time
	lasted time.Duration
}

func (m *movedTurns) move(ctx context.Context, lasted time.Duration) error {
	if lasted != 0 {
		m.since, m.lasted = time.Now(), max(lasted, -lasted)
	}
	if m.since.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	var moved int
	err := m.pool.QueryRow(ctx, sql.LedgerMoveTurns, turnsMax, (m.lasted + time.Since(m.since)).Seconds()).Scan(&moved)
	if err != nil {
		return fmt.Errorf("move the turns to pay: %w", err)
	}
	if moved == 0 {
		m.since = time.Time{}
	}
	return nil
}
