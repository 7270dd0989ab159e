package draws

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/draw"
	"stampede/reservation/order"
	"stampede/sql"
)

// Waitlists returns the sales with waiting lists whose entries are not over.
func (s *Store) Waitlists(ctx context.Context) ([]uuid.UUID, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWaitlists) // its error comes with the rows
	lists, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("list waiting lists: %w", err)
	}
	return lists, nil
}

// OfferWaiting is Offer to the next ones of a waiting list, at most left of them, who entered before that time. The
// caller knows that each entry from before is in Postgres, so that nobody is passed over.
func (s *Store) OfferWaiting(
	ctx context.Context, goods uuid.UUID, left int64, before time.Time, reserve Reserver,
) (int, error) {
	return s.offer(ctx, goods, reserve, func(tx pgx.Tx, d *Draw) ([]Turn, error) {
		next := d.Offered + d.Skipped
		most := min(left, order.MaxPerMessage)
		lost, err := d.lost(ctx, tx, Turn{Epoch: d.epoch}, most)
		if err == nil && len(lost) == 0 && d.offersEpoch < d.epoch {
			_, err = tx.Exec(ctx, sql.DrawsNoneLost, d.SaleID, d.epoch)
		}
		if most -= int64(len(lost)); err != nil || most == 0 {
			return lost, err
		}
		rows, _ := tx.Query(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, before, most) // its error comes with the rows
		return pgx.AppendRows(lost, rows, func(row pgx.CollectableRow) (Turn, error) {
			t := Turn{Rank: next, Epoch: d.epoch}
			err := row.Scan(&t.EntryID, &t.UserID, &t.Place, nil)
			t.OrderID = d.orderID(t.EntryID)
			next++
			return t, err
		})
	})
}

// IsWaiting returns whether anybody waits for units of a sale.
func (s *Store) IsWaiting(ctx context.Context, d *Draw) (bool, error) {
	tag, err := s.pool.Exec(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, nil, 1)
	return tag.RowsAffected() > 0, wrap("look who waits", d.SaleID, err)
}

// WaitingPlaces returns the places of all who wait for units of a sale, in their order.
func (s *Store) WaitingPlaces(ctx context.Context, goods uuid.UUID) (places []int64, err error) {
	err = s.pool.QueryRow(ctx, sql.DrawsWaitingPlaces, goods).Scan(&places)
	return places, wrap("list who waits", goods, err)
}

// Waiter is a user in a waiting list.
type Waiter struct {
	EntryID    uuid.UUID
	Place      int64
	ReservedAt time.Time
	// HasLeft is true if the entry is cancelled.
	HasLeft bool
	// Outcome is empty until the user had a turn. Reason says why the user was skipped, and OrderID is the order that was
	// made of the offer.
	Outcome draw.Outcome
	Reason  draw.Reason
	OrderID uuid.UUID
}

// Waiter returns the place of a user in the waiting list of a sale, or order.ErrNotFound.
func (s *Store) Waiter(ctx context.Context, goods uuid.UUID, user string) (Waiter, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWaiter, goods, user) // its error comes with the rows
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
		EntryID          uuid.UUID
		Place            int64
		ReservedAt       time.Time
		OrderID          zeronull.UUID
		Reason           draw.Reason
		HasLeft, Decided bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrNotFound
	}
	w := Waiter{
		EntryID: r.EntryID, Place: r.Place, ReservedAt: r.ReservedAt.UTC(), HasLeft: r.HasLeft, OrderID: uuid.UUID(r.OrderID),
		Reason: r.Reason,
	}
	if r.Decided {
		w.Outcome = outcome(r.Reason)
	}
	return w, wrap("find who waits", goods, err)
}
