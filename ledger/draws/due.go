package draws

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/sql"
)

// What a worker has to do is found by what changed, and not by looking at each draw and waiting list: the statements
// that return units to a sale, publish its changes, rank entries or raise its epoch note the sale in offers_due. It
// stays there until a worker that had the lock of the draw found nothing to offer (Done), so that a worker that dies
// loses nothing.

// Unprepared returns the draws whose entries are over and not ranked, and which wait for more than their round. First
// come those whose lists must be frozen soonest.
func (s *Store) Unprepared(ctx context.Context) ([]Draw, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsUnprepared) // its error comes with the rows
	sales, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("list draws that are due: %w", err)
	}
	return s.findInOrder(ctx, sales)
}

func (s *Store) findInOrder(ctx context.Context, sales []uuid.UUID) ([]Draw, error) {
	if len(sales) == 0 {
		return nil, nil
	}
	found, err := s.FindAll(ctx, sales)
	place := make(map[uuid.UUID]int, len(sales))
	for i, sale := range sales {
		place[sale] = i
	}
	slices.SortFunc(found, func(a, b Draw) int { return cmp.Compare(place[a.SaleID], place[b.SaleID]) })
	return found, err
}

// Due returns the draws or waiting lists of which units may have to be offered: first those that have waited longest.
func (s *Store) Due(ctx context.Context, kind Kind) ([]Draw, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsDue, kind) // its error comes with the rows
	var sales []uuid.UUID
	turns := map[uuid.UUID]int64{}
	var sale uuid.UUID
	var turn int64
	_, err := pgx.ForEachRow(rows, []any{&sale, &turn}, func() error {
		sales, turns[sale] = append(sales, sale), turn
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list units to offer: %w", err)
	}
	found, err := s.findInOrder(ctx, sales)
	for i := range found {
		found[i].due = turns[found[i].SaleID]
	}
	return found, err
}

// Turn changes when there may be more to offer of a draw that Due returned.
func (d *Draw) Turn() int64 { return d.due }

// InEpoch is true for the epoch of the sale.
func (d *Draw) InEpoch(epoch int64) bool { return epoch == d.epoch }

// Done notes that no unit of a draw that Due returned can be offered, unless that has changed since.
func (s *Store) Done(ctx context.Context, d *Draw) error {
	_, err := s.pool.Exec(ctx, sql.DrawsDone, d.SaleID, d.due)
	return wrap("leave", d.SaleID, err)
}

// NoteDue has Due return those of the sales that are drawn or have a waiting list. Who releases units outside of a
// sweep calls it.
func (s *Store) NoteDue(ctx context.Context, sales []uuid.UUID) error {
	if _, err := s.pool.Exec(ctx, sql.DrawsNoteDue, sales); err != nil {
		return fmt.Errorf("note units to offer: %w", err)
	}
	return nil
}

// OpenSale is a sale whose units are offered. Unfinished is true if it is due, whatever is left of it. Closed is true
// for a waiting list that nobody can join, which is due until it sells plainly.
type OpenSale struct {
	SaleID             uuid.UUID
	Partitions, Shards int
	Items              int // how many
	Unfinished         bool
	Closed             bool
}

// Open returns the sales whose units are offered by rank, or to those who wait.
func (s *Store) Open(ctx context.Context, kind Kind) ([]OpenSale, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsOpen, kind) // its error comes with the rows
	sales, err := pgx.CollectRows(rows, pgx.RowToStructByName[OpenSale])
	if err != nil {
		return nil, fmt.Errorf("list sales whose units are offered: %w", err)
	}
	return sales, nil
}

// Watched is a draw or a waiting list that operators watch.
type Watched struct {
	Draw
	// Name is that of the sale whose units are offered.
	Name string
	// At is the time by the clock of Postgres.
	At time.Time
	// Waiting are the entries of a waiting list that had no turn.
	Waiting int64
	Offers  Offers
}

// Offers are those of the latest turnsWatched turns of each item.
type Offers struct {
	Open, Expired int64
	// Answered offers are paid or cancelled; without a payment window all are.
	Answered int64
	// Oldest is the age of the oldest open one.
	Oldest time.Duration
}

// turnsWatched is how many turns of an item tell how offers end.
const turnsWatched = 20

// Watch returns the draws and the waiting lists whose goods are not over: at most so many of each. The void and late
// draws, and the longest lists, come first.
func (s *Store) Watch(ctx context.Context, most int) ([]Watched, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsWatched, most, turnsWatched) // its error comes with the rows
	type row struct {
		SaleID                  uuid.UUID
		Name                    string
		At                      time.Time
		Waiting                 int64
		Open, Expired, Answered int64
		Oldest                  float64
	}
	read, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	if err != nil {
		return nil, fmt.Errorf("look at the draws: %w", err)
	}
	sales, of := make([]uuid.UUID, len(read)), make(map[uuid.UUID]row, len(read))
	for i, r := range read {
		sales[i], of[r.SaleID] = r.SaleID, r
	}
	found, err := s.findInOrder(ctx, sales)
	if err != nil {
		return nil, err
	}
	watched := make([]Watched, len(found))
	for i, d := range found {
		r := of[d.SaleID]
		watched[i] = Watched{d, r.Name, r.At, r.Waiting, Offers{
			Open: r.Open, Expired: r.Expired, Answered: r.Answered, Oldest: time.Duration(r.Oldest * float64(time.Second)),
		}}
		if d.State == Open {
			watched[i].Offers = Offers{} // there are no more
		}
	}
	return watched, nil
}

// Step is what a draw waits for.
type Step string

// The steps. A worker freezes and ranks, a party reveals, and anyone brings the round.
const (
	StepFreeze Step = "freeze"
	StepBeacon Step = "beacon"
	StepReveal Step = "reveal"
	StepRank   Step = "rank"
)

// The time that each step takes at most in a large draw. A freeze has half of the time before its round if that is
// shorter, and a reveal half of the time until it is too late.
const (
	freezeTakes = 2 * time.Minute
	beaconTakes = 2 * time.Minute
	rankTakes   = 5 * time.Minute
)

// Next returns the step that the draw waits for, "" for none; for how long it has done so beyond the time that the step
// takes; and the time from which on the draw is void without it, zero if it waits on.
func (w *Watched) Next() (step Step, late time.Duration, until time.Time) {
	var due time.Time
	switch {
	case w.State == Freezing:
		step, due = StepFreeze, w.ClosesAt.Add(min(freezeTakes, w.Freeze/2))
		if len(w.Parties) == 0 {
			until = draw.RoundTime(draw.LastRound(w.ClosesAt, w.Freeze))
		}
	case w.State == Frozen && !w.RevealBy.IsZero():
		step, due, until = StepReveal, w.FrozenAt.Add(w.RevealBy.Sub(w.FrozenAt)/2), w.RevealBy
	case w.State == Frozen:
		step, due = StepBeacon, draw.RoundTime(w.Round()).Add(beaconTakes)
	case w.State == Ranking:
		step, due = StepRank, w.SeededAt.Add(rankTakes)
	default:
		return "", 0, time.Time{}
	}
	return step, max(0, w.At.Sub(due)), until
}
