package ledger

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/pause"
	"stampede/internal/retry"
	"stampede/sql"
)

const (
	// heartbeatInterval is how often an ingress records that it runs. An order is overdue at the first heartbeat
	// after its deadline, so it is paid for so much longer at most.
	heartbeatInterval = time.Second
	// heartbeatTimeout bounds a heartbeat, which may wait for another one's row lock.
	heartbeatTimeout = 5 * time.Second
)

// Heartbeat tells through Postgres that an ingress is there, so that buyers can pay. Every ingress runs one.
// When all were away, or Postgres was, the first one to be back puts the deadlines off: the time in which
// nobody could pay is no part of anybody's time to pay.
type Heartbeat struct {
	Pool   *pgxpool.Pool
	Logger *slog.Logger
}

// Run sends a heartbeat once a second until ctx ends, and returns nil then. While Postgres is away it goes on trying.
func (h Heartbeat) Run(ctx context.Context) error {
	sending := retry.Outage{Log: h.Logger, Doing: "tell Postgres that buyers can pay"}
	for {
		lasted, err := h.Send(ctx)
		if ctx.Err() != nil {
			return nil
		}
		sending.Note(err)
		if lasted > 0 {
			h.Logger.Warn("nobody could pay for a while: deadlines are put off", "outage", lasted)
		}
		if !pause.For(heartbeatInterval, ctx.Done()) {
			return nil
		}
	}
}

// Send records a heartbeat. It returns how long the outage lasted that it found, and 0 if it found none.
func (h Heartbeat) Send(ctx context.Context) (lasted time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	var seconds float64
	if err := h.Pool.QueryRow(ctx, sql.LedgerHeartbeat).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("heartbeat: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
