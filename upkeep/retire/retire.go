package retire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"stampede/internal/pg"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
)

// Config configures a Retirer. All fields are required.
type Config struct {
	Pool    *pgxpool.Pool
	Redis   redis.UniversalClient
	Keys    reservation.Keys
	Store   *reservation.Store
	Catalog *catalog.Catalog
	// After is how long a sale must have been over.
	After  time.Duration
	Logger *slog.Logger
}

const (
	// candidatesMax bounds the sales of one sweep.
	candidatesMax = 100
	// waitMin and waitMax bound the pause before a sale that is not at rest is looked at again. It doubles.
	waitMin, waitMax = time.Second, 5 * time.Minute
	// waitingMax bounds how many such sales are remembered. The others are looked at too often.
	waitingMax = 10_000
	// silenceMax is how long the session with the lock may be silent before Postgres ends it. A large sale may take
	// longer: then another worker looks at it as well, and one of them retires it.
	silenceMax = 50 * time.Second
	// countTimeout bounds the count of the orders of a sale.
	countTimeout = time.Minute
)

// Retirer finds sales that can leave Redis. It belongs to one goroutine.
type Retirer struct {
	Config
	waiting map[uuid.UUID]*wait
}

// wait is when to look at a sale again.
type wait struct {
	until time.Time
	pause time.Duration
	why   string
}

// New returns a Retirer.
func New(c Config) *Retirer { return &Retirer{Config: c, waiting: map[uuid.UUID]*wait{}} }

// candidate is a sale that is over.
type candidate struct {
	ID                 uuid.UUID
	Partitions, Shards int
	Epoch, Revision    int64
}

func (s *candidate) layout() reservation.Layout {
	return reservation.LayoutOf(s.ID, s.Partitions, s.Shards)
}

// Sweep retires the sales that have been over for long enough and are at rest, and returns how many. Any number of
// workers may call it; one at a time does the work. Sales that are not at rest are left for later, and are no error.
func (r *Retirer) Sweep(ctx context.Context) (retired int, err error) {
	found, err := r.candidates(ctx)
	if err != nil || len(found) == 0 {
		return 0, err
	}
	lock, err := pg.Begin(ctx, r.Pool, pg.RetireLock, silenceMax)
	if errors.Is(err, pg.ErrLockHeld) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer lock.End()
	var failed []error
	for i := range found {
		s := &found[i]
		why, err := r.retire(ctx, s)
		switch {
		case ctx.Err() != nil:
			return retired, ctx.Err()
		case err != nil:
			failed = append(failed, fmt.Errorf("retire sale=%s: %w", s.ID, err))
			r.postpone(s.ID, err.Error())
		case why != "":
			r.postpone(s.ID, why)
		default:
			delete(r.waiting, s.ID)
			retired++
			r.Logger.Info("a sale that is over has left Redis", "sale", s.ID)
		}
	}
	return retired, errors.Join(failed...)
}

// candidates returns sales that are over and need not wait.
func (r *Retirer) candidates(ctx context.Context) ([]candidate, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	now, except := time.Now(), []uuid.UUID{}
	for id, w := range r.waiting {
		if now.Before(w.until) {
			except = append(except, id)
		}
	}
	// Its error comes with the rows.
	rows, _ := r.Pool.Query(ctx, sql.RetireCandidates, r.After.Seconds(), except, candidatesMax)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[candidate])
	if err != nil {
		return nil, fmt.Errorf("list sales that are over: %w", err)
	}
	return found, nil
}

// postpone leaves a sale for later.
func (r *Retirer) postpone(id uuid.UUID, why string) {
	w := r.waiting[id]
	if w == nil {
		if len(r.waiting) >= waitingMax {
			clear(r.waiting)
		}
		w = &wait{pause: waitMin / 2}
		r.waiting[id] = w
	}
	w.pause = min(2*w.pause, waitMax)
	w.until = time.Now().Add(w.pause)
	if w.why != why {
		w.why = why
		r.Logger.Debug("a sale that is over stays in Redis for now", "sale", id, "reason", why)
	}
}

// retire retires a sale, or returns why it cannot be retired yet.
func (r *Retirer) retire(ctx context.Context, s *candidate) (why string, err error) {
	for _, check := range []func(context.Context, *candidate) (string, error){
		r.open, r.servers, r.waitingEntries, r.differences,
	} {
		if why, err := check(ctx, s); err != nil || why != "" {
			return why, err
		}
	}
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	err = r.Catalog.Retire(limited, s.ID, s.Epoch, s.Revision)
	switch {
	case errors.Is(err, catalog.ErrNotRetired):
		return "it has just changed", nil
	case errors.Is(err, catalog.ErrNotInForce):
		r.Logger.Warn("a sale is retired in Postgres, and leaves Redis when that can be published", "sale", s.ID,
			"error", err)
		return "", nil
	}
	return "", err
}
