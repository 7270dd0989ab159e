package fulfillment

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/reservation"
	"stampede/sql"
)

// releaseSome tells Redis of at most sweepMax releases of one sale, and forgets them once it knows. It is
// a sweepStep.
//
// They are taken first and for good only when Redis has answered. Whoever dies in between leaves them to
// the next one, who tells Redis again; a unit comes back once all the same, because lua/release.lua finds
// the reservation gone, or one of another order if the buyer has bought again.
func (l *Ledger) releaseSome(ctx context.Context, store *reservation.Store, except []uuid.UUID) (sale uuid.UUID, released int, err error) {
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, sql.TakeReleases, except, sweepMax) // its error comes with the rows
		releases, err := pgx.CollectRows(rows, pgx.RowToStructByPos[reservation.Release])
		if err != nil || len(releases) == 0 {
			return err
		}
		sale = releases[0].SaleID
		crashpoint.Hit(crashpoint.BeforeRelease)
		limited, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		if _, err := store.Release(limited, releases); err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.AfterRelease)
		released = len(releases)
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
