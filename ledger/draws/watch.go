package draws

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/sql"
)

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
