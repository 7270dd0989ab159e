package fulfillment

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/pause"
	"stampede/sql"
)

const (
	// pulseInterval is how often an ingress tells that it is there. An order is overdue at the first pulse
	// after its deadline, so it is paid for so much longer at most.
	pulseInterval = time.Second
	// pulseTimeout bounds a beat, of which another one may have the row in hand.
	pulseTimeout = 5 * time.Second
)

// Pulse tells through Postgres that an ingress is there, so that buyers can pay. Every ingress runs one.
// When all were away, or Postgres was, the first one to be back puts the deadlines off: the time in which
// nobody could pay is no part of anybody's time to pay.
type Pulse struct {
	Pool   *pgxpool.Pool
	Logger *slog.Logger
}

// Run beats once a second until ctx ends, and returns nil then. While Postgres is away it goes on trying.
func (p Pulse) Run(ctx context.Context) error {
	beating := outage{log: p.Logger, doing: "tell Postgres that buyers can pay"}
	for {
		lasted, err := p.beat(ctx)
		if ctx.Err() != nil {
			return nil
		}
		beating.note(err)
		if lasted > 0 {
			p.Logger.Warn("nobody could pay for a while: deadlines are put off", "outage", lasted)
		}
		if !pause.For(pulseInterval, ctx.Done()) {
			return nil
		}
	}
}

// beat returns how long an outage lasted that it found, and 0 if it found none.
func (p Pulse) beat(ctx context.Context) (lasted time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, pulseTimeout)
	defer cancel()
	var seconds float64
	if err := p.Pool.QueryRow(ctx, sql.LedgerHeartbeat).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("pulse: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
