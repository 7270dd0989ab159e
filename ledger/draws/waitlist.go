package draws

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/draw"
	"stampede/reservation/order"
	"stampede/sql"
)

// Waiting returns the entries of the next ones who wait, by place: at most so many, up to the first one who did not
// enter before that time. The caller knows that each entry from before is in Postgres, so that nobody is passed over.
// It reads the whole list.
func (s *Store) Waiting(ctx context.Context, d *Draw, before time.Time, most int) (next []uuid.UUID, err error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, most) // its error comes with the rows
	var id uuid.UUID
	var reservedAt time.Time
	isBefore := true
	_, err = pgx.ForEachRow(rows, []any{&id, &reservedAt}, func() error {
		// A clock that was set back has later places enter earlier.
		if isBefore = isBefore && reservedAt.Before(before); isBefore {
			next = append(next, id)
		}
		return nil
	})
	return next, wrap("look who waits", d.SaleID, err)
}

// OfferWaiting is Offer to those of next who had no turn, at most left of them, in their order. waits is false if all
// of them had one.
func (s *Store) OfferWaiting(
	ctx context.Context, goods uuid.UUID, left int64, next []uuid.UUID, reserve Reserver,
) (done int, waits bool, err error) {
	waits = true
	done, err = s.offer(ctx, goods, reserve, func(tx pgx.Tx, d *Draw) ([]Turn, error) {
		most := min(left, order.MaxPerMessage)
		turns, err := d.lost(ctx, tx, Turn{Epoch: d.epoch}, most)
		if err == nil && len(turns) == 0 && d.offersEpoch < d.epoch {
			_, err = tx.Exec(ctx, sql.DrawsNoneLost, d.SaleID, d.epoch)
		}
		if most -= int64(len(turns)); err != nil || most == 0 {
			return turns, err
		}
		t := Turn{Rank: d.Offered + d.Skipped, Epoch: d.epoch}
		rows, _ := tx.Query(ctx, sql.DrawsStillWaiting, d.SaleID, d.EntriesID, next, most) // its error comes with the rows
		_, err = pgx.ForEachRow(rows, []any{&t.EntryID, &t.UserID, &t.Place, &t.Cancelled}, func() error {
			t.OrderID = d.orderID(t.EntryID)
			turns = append(turns, t)
			t.Rank++
			return nil
		})
		waits = len(turns) > 0
		return turns, err
	})
	return done, waits, err
}

// IsWaiting returns whether anybody waits for units of a sale.
func (s *Store) IsWaiting(ctx context.Context, d *Draw) (bool, error) {
	tag, err := s.pool.Exec(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, 1)
	return tag.RowsAffected() > 0, wrap("look who waits", d.SaleID, err)
}

// WaitingPlacesMax bounds the places of a list that are read.
const WaitingPlacesMax = 2_000_000

// WaitingPlaces returns the first WaitingPlacesMax places of those who wait for units of a sale, in their order.
func (s *Store) WaitingPlaces(ctx context.Context, goods uuid.UUID) (places []int64, err error) {
	err = s.pool.QueryRow(ctx, sql.DrawsWaitingPlaces, goods, WaitingPlacesMax).Scan(&places)
	return places, wrap("list who waits", goods, err)
}

// Waiter is a user in a waiting list.
type Waiter struct {
	EntryID uuid.UUID
	Place   int64
	// HasLeft is true if the entry is cancelled.
	HasLeft bool
	// Outcome is empty until the user had a turn. Reason says why the user was skipped, and OrderID is the order that was
	// made of the offer.
	Outcome draw.Outcome
	Reason  draw.Reason
	OrderID uuid.UUID
	// Holds is true if that order is live.
	Holds bool
}

// Waiter returns the place of a user in the waiting list of a sale, or order.ErrNotFound.
func (s *Store) Waiter(ctx context.Context, goods uuid.UUID, user string) (Waiter, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWaiter, goods, user) // its error comes with the rows
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
		EntryID          uuid.UUID
		Place            int64
		OrderID          zeronull.UUID
		Reason           draw.Reason
		HasLeft, Decided bool
		Holds            bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrNotFound
	}
	w := Waiter{
		EntryID: r.EntryID, Place: r.Place, HasLeft: r.HasLeft, OrderID: uuid.UUID(r.OrderID), Holds: r.Holds,
		Reason: r.Reason,
	}
	if r.Decided {
		w.Outcome = outcome(r.Reason)
	}
	return w, wrap("find who waits", goods, err)
}
