package draws

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/draw"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// Turn is the next rank of an item, with the entry that has it.
type Turn struct {
	// Item is the letter of the item, and Code its code; both are empty in a sale without items.
	Item, Code string
	Rank       int64
	Place      int64
	EntryID    uuid.UUID
	UserID     string
	// OrderID is the id of the order that an offer makes. It follows from the draw, the entry and the epoch, so that
	// an order that is lost with Redis, and void for ever, is not the one of the next offer.
	OrderID uuid.UUID
	// Epoch is the epoch of the sale in which the offer is made.
	Epoch int64

	// Cancelled is true if the entry is.
	Cancelled bool
}

// Result is what became of a turn.
type Result string

// The results. NoUnit leaves the rank, and all later ranks of the item, for later.
const (
	// Won: the unit is reserved, be it by a repeat. Then OrderID of the turn is that of the order that was made first.
	Won Result = "won"
	// Holds: the entrant has another order in the sale.
	Holds Result = "holds"
	// Cancelled: so is the entry, and no unit was reserved before.
	Cancelled Result = "cancelled"
	// NoUnit: no unit is left, or the sale does not sell now.
	NoUnit Result = "no unit"
)

// Reserver reserves a unit for the entrant of each turn, in their order, and returns a result for each. It sets the
// OrderID of those that are Won, and gives no unit of an item after a turn of the item that got none. A turn that is
// cancelled gets no new unit.
type Reserver func(ctx context.Context, turns []Turn) ([]Result, error)

// Offer has the next ranks have their turn, and records what became of them: of each item at most so many, by its
// letter, "" in a sale without items. It returns how many had theirs. One process at a time does so for a draw; the
// others get pg.ErrLockHeld. Entries that were cancelled are skipped.
//
// After a crash between reserve and the record the same turns come again, and reserve recognizes them by their entries.
// Before new ranks come those whose orders were lost with Redis (lost). The transaction stays open over the call on
// purpose: the lock on the draw is the lease of this process, and ends with its connection.
func (s *Store) Offer(
	ctx context.Context, goods uuid.UUID, ranks map[string]int64, reserve Reserver,
) (done int, err error) {
	return s.offer(ctx, goods, reserve, func(tx pgx.Tx, d *Draw) ([]Turn, error) {
		first := int64(0) // of the ranks of the item
		return d.turns(ctx, tx, ranks, func(item int, t Turn, most int64) (turns []Turn, err error) {
			entries, expected := d.ItemEntries[item], t.Rank
			defer func() { first += entries }()
			if most = min(most, entries-t.Rank); most <= 0 {
				return nil, nil
			}
			rows, _ := tx.Query(ctx, sql.DrawsTurns, goods, d.EntriesID, first, t.Rank, most) // its error comes with the rows
			last := t.Rank + most
			_, err = pgx.ForEachRow(rows, []any{&t.Rank, &t.Place, &t.EntryID, &t.UserID, &t.Cancelled}, func() error {
				if t.Rank != expected {
					return fmt.Errorf("%w: that of rank %d%s is missing", errChunksMissing, expected, t.Item)
				}
				expected++
				t.OrderID = d.orderID(t.EntryID)
				turns = append(turns, t)
				return nil
			})
			if err == nil && expected < last {
				err = fmt.Errorf("%w: that of rank %d%s is missing", errChunksMissing, expected, t.Item)
			}
			return turns, err
		})
	})
}

// offer has the next turns.
func (s *Store) offer(
	ctx context.Context, goods uuid.UUID, reserve Reserver, next func(pgx.Tx, *Draw) ([]Turn, error),
) (done int, err error) {
	err = pg.InTransaction(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		done = 0
		err := tx.QueryRow(ctx, sql.DrawsLockFree, goods).Scan(nil)
		if errors.Is(err, pgx.ErrNoRows) {
			return pg.ErrLockHeld
		} else if err != nil {
			return err
		}
		d, err := find(ctx, tx, goods)
		if err != nil || d.State != Offering || d.Paused {
			return err
		}
		turns, err := next(tx, &d)
		if err != nil {
			return err
		}
		done, err = d.offer(ctx, tx, turns, reserve)
		return err
	})
	return done, wrap("offer units", goods, err)
}

// OpenRest sells what is left to everybody, if each rank had its turn and an operator has asked for it. waits is true
// while an order that was offered is not in Postgres.
func (s *Store) OpenRest(ctx context.Context, goods uuid.UUID) (opened, waits bool, err error) {
	_, err = change(ctx, s.pool, goods, func(tx pgx.Tx, d *Draw) error {
		opened, waits = false, false
		if d.State != Over || d.GoodsOver || !d.Opening {
			return nil
		}
		if err := tx.QueryRow(ctx, sql.CatalogLockSale, goods).Scan(nil); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, sql.DrawsOpenRest, goods).Scan(nil)
		if waits = errors.Is(err, pgx.ErrNoRows); waits {
			err = nil
		}
		opened = err == nil && !waits
		return err
	})
	return opened, waits, wrap("open what is left", goods, err)
}

// NextRanks returns the next rank of each item that had a turn, by its letter.
func NextRanks(ctx context.Context, on pg.Querier, goods uuid.UUID) (map[string]int64, error) {
	next := map[string]int64{}
	rows, _ := on.Query(ctx, sql.DrawsNextRanks, goods) // its error comes with the rows
	var item string
	var rank int64
	_, err := pgx.ForEachRow(rows, []any{&item, &rank}, func() error {
		next[item] = rank
		return nil
	})
	return next, err
}

// turns returns the next ones: of each item at most ranks, first those that were lost and then those that next returns,
// from the rank of its turn on. All together are not more than one call of the script takes.
func (d *Draw) turns(
	ctx context.Context, tx pgx.Tx, ranks map[string]int64, next func(item int, from Turn, most int64) ([]Turn, error),
) (turns []Turn, err error) {
	rank, err := NextRanks(ctx, tx, d.SaleID)
	if err != nil {
		return nil, err
	}
	noneLost := d.offersEpoch < d.epoch
	for item := range max(1, len(d.Items)) {
		letter, code := d.item(item)
		from := Turn{Item: letter, Code: code, Rank: rank[letter], Epoch: d.epoch}
		most := min(ranks[letter], int64(order.MaxPerMessage-len(turns)))
		lost, err := d.lost(ctx, tx, from, most)
		if err != nil {
			return nil, err
		}
		noneLost = noneLost && most > 0 && len(lost) == 0
		turns = append(turns, lost...)
		others, err := next(item, from, most-int64(len(lost)))
		if err != nil {
			return nil, err
		}
		turns = append(turns, others...)
	}
	if noneLost {
		_, err = tx.Exec(ctx, sql.DrawsNoneLost, d.SaleID, d.epoch)
	}
	return turns, err
}

// item returns the letter and the code of an item by its place; both are empty in a sale without items.
func (d *Draw) item(place int) (letter, code string) {
	if len(d.Items) == 0 {
		return "", ""
	}
	return order.ItemLetter(place), d.Items[place].Code
}

// orderID is a UUIDv7 whose random bits follow from what is offered, with the tag of the sale as in order.NewOrderID.
// Its time is that of the seed; in a waiting list, which has none, that of the entry.
func (d *Draw) orderID(entry uuid.UUID) (id uuid.UUID) {
	goods := d.SaleID
	text := append(append([]byte("stampede offer"), goods[:]...), entry[:]...)
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(text, uint64(d.epoch)))
	copy(id[:], sum[:])
	copy(id[:6], entry[:6])
	if d.Kind == ByHash {
		binary.BigEndian.PutUint64(id[:], uint64(d.SeededAt.UnixMilli())<<16|uint64(sum[6])<<8|uint64(sum[7]))
	}
	id[6] = id[6]&0x0f | 7<<4
	id[8] = id[8]&0x3f | 0x80 // the variant of RFC 9562
	copy(id[14:], goods[14:])
	return id
}

// offer has the turns, and records them up to the first of each item that got no unit.
func (d *Draw) offer(ctx context.Context, tx pgx.Tx, turns []Turn, reserve Reserver) (int, error) {
	if len(turns) == 0 {
		return 0, nil
	}
	crashpoint.Hit(crashpoint.BeforeOffer)
	results, err := reserve(ctx, turns)
	if err != nil {
		return 0, err
	}
	crashpoint.Hit(crashpoint.AfterOffer)
	var r record
	over := map[string]bool{}
	for i, t := range turns {
		over[t.Item] = over[t.Item] || results[i] == NoUnit
		switch {
		case over[t.Item]:
		case results[i] == Cancelled:
			r.add(t, draw.SkippedCancelled)
		case results[i] == Holds:
			r.add(t, draw.SkippedHolder)
		default:
			r.add(t, "")
		}
	}
	if len(r.items) == 0 {
		return 0, nil
	}
	_, err = tx.Exec(ctx, sql.DrawsRecordOffers, d.SaleID, r.items, r.ranks, r.places, r.entries, r.orders, r.reasons,
		d.epoch)
	if err == nil {
		crashpoint.Hit(crashpoint.BeforeOfferCommit)
	}
	return len(r.items), err
}

// record has the columns of record_offers.sql.
type record struct {
	items         []string
	ranks, places []int64
	entries       []uuid.UUID
	orders        []zeronull.UUID
	reasons       []zeronull.Text
}

func (r *record) add(t Turn, skipped draw.Reason) {
	id := zeronull.UUID(t.OrderID)
	if skipped != "" {
		id = zeronull.UUID{}
	}
	r.items, r.ranks, r.places = append(r.items, t.Item), append(r.ranks, t.Rank), append(r.places, t.Place)
	r.entries, r.orders = append(r.entries, t.EntryID), append(r.orders, id)
	r.reasons = append(r.reasons, zeronull.Text(skipped))
}

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
