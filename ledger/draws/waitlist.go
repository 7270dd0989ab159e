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

// Waiting returns the entries of the next ones who wait for an item, by place: at most so many, up to the first one who
// did not enter before that time. The item is a letter, "" in a sale without items. The caller knows that each entry
// from before is in Postgres, so that nobody is passed over. It reads the whole list.
func (s *Store) Waiting(
	ctx context.Context, d *Draw, item string, before time.Time, most int,
) (next []uuid.UUID, err error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, item, most) // its error comes with the rows
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

// OfferWaiting is Offer to those of next, by the letter of the item, who had no turn: of each item at most ranks, in
// their order. waits is true for the items of which somebody may be left of next who had none.
func (s *Store) OfferWaiting(
	ctx context.Context, goods uuid.UUID, ranks map[string]int64, next map[string][]uuid.UUID, reserve Reserver,
) (done int, waits map[string]bool, err error) {
	waits = map[string]bool{}
	for item := range ranks { // also if nothing is offered now
		waits[item] = true
	}
	done, err = s.offer(ctx, goods, reserve, func(tx pgx.Tx, d *Draw) ([]Turn, error) {
		return d.turns(ctx, tx, ranks, func(_ int, t Turn, most int64) (turns []Turn, err error) {
			if waits[t.Item] = most <= 0; most <= 0 || len(next[t.Item]) == 0 {
				return nil, nil
			}
			rows, _ := tx.Query(ctx, sql.DrawsStillWaiting, goods, d.EntriesID, next[t.Item], most) // rows carry the error
			_, err = pgx.ForEachRow(rows, []any{&t.EntryID, &t.UserID, &t.Place, &t.Cancelled}, func() error {
				t.OrderID = d.orderID(t.EntryID)
				turns = append(turns, t)
				t.Rank++
				return nil
			})
			waits[t.Item] = len(turns) > 0
			return turns, err
		})
	})
	return done, waits, err
}

// IsWaiting returns whether anybody waits for an item, by its letter.
func (s *Store) IsWaiting(ctx context.Context, d *Draw, item string) (bool, error) {
	tag, err := s.pool.Exec(ctx, sql.DrawsWaiting, d.SaleID, d.EntriesID, item, 1)
	return tag.RowsAffected() > 0, wrap("look who waits", d.SaleID, err)
}

// Letters are those of the items, in their order; one that is empty in a sale without items.
func (d *Draw) Letters() []string {
	letters := make([]string, max(1, len(d.Items)))
	for place := range letters {
		letters[place], _ = d.item(place)
	}
	return letters
}

// WaitingPlacesMax bounds the places of a list that are read.
const WaitingPlacesMax = 2_000_000

// WaitingPlaces returns the first WaitingPlacesMax places of those who wait for an item of a sale, by its letter, in
// their order.
func (s *Store) WaitingPlaces(ctx context.Context, goods uuid.UUID, item string) (places []int64, err error) {
	err = s.pool.QueryRow(ctx, sql.DrawsWaitingPlaces, goods, item, WaitingPlacesMax).Scan(&places)
	return places, wrap("list who waits", goods, err)
}

// Waiter is a user in a waiting list.
type Waiter struct {
	EntryID uuid.UUID
	Place   int64
	// Item is the letter of the item for which the user waits.
	Item string
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
		Item             string
		OrderID          zeronull.UUID
		Reason           draw.Reason
		HasLeft, Decided bool
		Holds            bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrNotFound
	}
	w := Waiter{
		EntryID: r.EntryID, Place: r.Place, Item: r.Item, HasLeft: r.HasLeft, OrderID: uuid.UUID(r.OrderID),
		Holds: r.Holds, Reason: r.Reason,
	}
	if r.Decided {
		w.Outcome = outcome(r.Reason)
	}
	return w, wrap("find who waits", goods, err)
}
