package draws

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

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

// NoteDue has Due return those of the sales that are drawn or have a waiting list. Who releases units outside of a sweep
// calls it.
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
