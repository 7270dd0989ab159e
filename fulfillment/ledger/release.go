package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// ComesToNothing is true for an order whose reservation may be left in Redis and must not be: one that was
// rejected, whenever that was, because the worker that recorded it may have been killed before it gave the
// units back; and one that had ended before this event of it came. An ingress that got no answer asks again
// with the same order, and when Redis has lost or released the first reservation meanwhile, makes a second one.
func ComesToNothing(out Outcome) bool {
	return out.Status == order.StatusRejected || out.Err == nil && !out.Fresh && !out.Status.Live()
}

func ReleaseOf(out Outcome) reservation.Release {
	e := &out.Event
	return reservation.Release{
		SaleID: e.SaleID, OrderID: e.OrderID, UserID: e.UserID, Quantity: e.Quantity, KeyFingerprint: e.KeyFingerprint, Status: out.Status,
	}
}

// ReleasesCounted bounds the count of releases that the metrics show.
const ReleasesCounted = 10_000

// errRefused: Redis does not have the sale, cannot read what the buyer holds, or more would be left of it than is
// for sale. That is not as it should be, and a rebuild mends it; until then the units are remembered.
var ErrRefused = errors.New("the units are refused by Redis")

// PendingReleases returns how many releases there are, but counts no more than releasesCounted. The error is
// errRefused if Redis has refused one of them.
func (l *Ledger) PendingReleases(ctx context.Context) (pending int, err error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	var order, sale *uuid.UUID
	if err := l.pool.QueryRow(ctx, sql.LedgerPendingReleases, ReleasesCounted).Scan(&pending, &order, &sale); err != nil {
		return 0, fmt.Errorf("count releases: %w", err)
	}
	if order != nil {
		return pending, fmt.Errorf("%w: those of sale=%s order=%s, and maybe of others", ErrRefused, sale, order)
	}
	return pending, nil
}

// ReleaseSome tells Redis of at most sweepMax releases of one sale, and forgets those that it is done
// with. What Redis refuses is kept, and taken again after a while. It is a sweepStep.
//
// They are forgotten when Redis has answered. Whoever dies in between leaves them to the next one, who
// tells Redis again; a unit comes back once all the same, because lua/release.lua finds the reservation
// gone, or one of another order if the buyer has bought again.
func (l *Ledger) ReleaseSome(ctx context.Context, store *reservation.Store, except []uuid.UUID) (sale uuid.UUID, released int, err error) {
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, sql.LedgerTakeReleases, except, SweepMax) // its error comes with the rows
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
