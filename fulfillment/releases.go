package fulfillment

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/sql"
)

// releasesCounted bounds the count of releases that the metrics show.
const releasesCounted = 10_000

// errRefused: Redis does not have the sale, cannot read what the buyer holds, or more would be left of it than is
// for sale. That is not as it should be, and a rebuild mends it; until then the units are remembered.
var errRefused = errors.New("the units are refused by Redis")

// releaseUnits has the units of ended orders come back to Redis, until ctx ends.
func (w *Worker) releaseUnits(ctx context.Context) {
	releasing := newTrouble(w.config.Logger, w.metrics, stepRelease, "give back the units of ended orders")
	for w.nextSweep(ctx) {
		released, err := sweepSales(ctx, func(ctx context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
			return w.ledger.releaseSome(ctx, w.config.Store, except)
		})
		if released > 0 {
			w.config.Logger.Info("gave the units of ended orders back", "orders", released)
		}
		pending, refused := w.ledger.pendingReleases(ctx)
		if ctx.Err() != nil {
			return
		}
		if refused == nil || errors.Is(refused, errRefused) {
			w.metrics.releases.Set(float64(pending))
		}
		releasing.note(errors.Join(err, refused))
	}
}

// pendingReleases returns how many releases there are, but counts no more than releasesCounted. The error is
// errRefused if Redis has refused one of them.
func (l *Ledger) pendingReleases(ctx context.Context) (pending int, err error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	var order, sale *uuid.UUID
	if err := l.pool.QueryRow(ctx, sql.LedgerPendingReleases, releasesCounted).Scan(&pending, &order, &sale); err != nil {
		return 0, fmt.Errorf("count releases: %w", err)
	}
	if order != nil {
		return pending, fmt.Errorf("%w: those of sale=%s order=%s, and maybe of others", errRefused, sale, order)
	}
	return pending, nil
}

// releaseSome tells Redis of at most sweepMax releases of one sale, and forgets those that it is done
// with. What Redis refuses is kept, and taken again after a while. It is a sweepStep.
//
// They are forgotten when Redis has answered. Whoever dies in between leaves them to the next one, who
// tells Redis again; a unit comes back once all the same, because lua/release.lua finds the reservation
// gone, or one of another order if the buyer has bought again.
func (l *Ledger) releaseSome(ctx context.Context, store *reservation.Store, except []uuid.UUID) (sale uuid.UUID, released int, err error) {
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, sql.LedgerTakeReleases, except, sweepMax) // its error comes with the rows
		releases, err := pgx.CollectRows(rows, pgx.RowToStructByName[reservation.Release])
		if err != nil || len(releases) == 0 {
			return err
		}
		sale = releases[0].SaleID
		crashpoint.Hit(crashpoint.BeforeRelease)
		limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		results, err := store.Release(limited, releases)
		if err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.AfterRelease)
		// Not nil, which would be NULL.
		done, unknown, damaged := []uuid.UUID{}, []uuid.UUID{}, []uuid.UUID{}
		for i, r := range releases {
			switch results[i] {
			case reservation.Released, reservation.ReleaseNotHeld:
				done = append(done, r.OrderID)
			case reservation.ReleaseUnknownSale:
				unknown = append(unknown, r.OrderID)
			default: // damaged, or a word of another version
				damaged = append(damaged, r.OrderID)
			}
		}
		var kept int
		if err := tx.QueryRow(ctx, sql.LedgerNoteReleases, sale, done, unknown, damaged).Scan(&kept); err != nil {
			return err
		}
		released = len(releases) - kept
		return nil
	})
	if err != nil {
		return sale, 0, fmt.Errorf("give units back: %w", err)
	}
	if released > 0 {
		crashpoint.Hit(crashpoint.AfterReleaseCommit)
	}
	return sale, released, nil
}
