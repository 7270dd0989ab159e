package draws

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// portionChunks is how many chunks are read, and written, at a time: it bounds the memory of a freeze.
const portionChunks = 64

// commitMargin is how long before a round the clock must be read, or half a freeze if that is shorter. A later list is
// frozen after the round, for the next one. Once the clock is read, Postgres ends the transaction if a statement or a
// silence takes an eighth of the margin. There are six of them, and the commit has the rest of the time.
const (
	commitMargin = 10 * time.Second
	marginSteps  = 8
)

var (
	// errChanged is returned for a list that differs from the live orders: it begins again.
	errChanged = errors.New("the list is not that of the live orders")
	// errRoundComes is returned just before a round.
	errRoundComes = errors.New("a round comes before the list can be frozen")
)

// silenceMax is how long the session that freezes or ranks may be silent before Postgres ends it: longer than it
// takes to sort the entries of the largest draw.
const silenceMax = 2 * time.Minute

// Prepare freezes and ranks the draw of the sale as far as it can: the entries are final if that is true. One process
// at a time does so for a draw; the others return pg.ErrLockHeld.
func (s *Store) Prepare(ctx context.Context, goods uuid.UUID) error {
	lock, err := pg.Begin(ctx, s.pool, pg.DrawLock(goods), silenceMax)
	if err != nil {
		return err
	}
	defer lock.End()
	// Without statistics, as in the first minutes of a sale, Postgres would sort all entries for each part of them.
	if err := lock.Run(ctx, "SET enable_sort = off"); err != nil {
		return err
	}
	if err := s.freeze(ctx, lock.Conn, goods); err != nil {
		return err
	}
	return s.rank(ctx, lock.Conn, goods)
}

// freeze freezes the list of the entries, all of which must be final: over, in Postgres, and unable to become others.
// So none is added later; it also asks for a stock of the entries sale that leaves nothing. It makes the draw void if
// the last round is over. After a crash it goes on with the next part of the list. It does nothing in another state.
//
// The caller excludes other calls (pg.DrawLock). Two at once harm nothing: one of them fails.
func (s *Store) freeze(ctx context.Context, conn *pgx.Conn, goods uuid.UUID) error {
	d, err := find(ctx, conn, goods)
	if err != nil || d.State != Freezing {
		return err
	}
	f := &freezing{Draw: &d, conn: conn}
	if err := f.readRest(ctx); err != nil {
		return fmt.Errorf("read the entries of sale=%s: %w", goods, err)
	}
	_, err = change(ctx, conn, goods, func(tx pgx.Tx, d *Draw) error { return f.freeze(ctx, tx, d) })
	switch {
	case errors.Is(err, errRoundComes):
		return nil // the next try is after it
	case errors.Is(err, errChanged):
		_, forgotten := conn.Exec(ctx, sql.DrawsBeginAgain, goods)
		err = errors.Join(err, forgotten)
	}
	if err != nil {
		return fmt.Errorf("freeze the entries of sale=%s: %w", goods, err)
	}
	return nil
}

// freezing is a list that is not frozen yet.
type freezing struct {
	*Draw
	conn *pgx.Conn
	// chunks is how many there are, and last the last entry of them.
	chunks int64
	last   uuid.UUID
	count  int64
}

// readRest adds the entries to the list that are not in it yet.
func (f *freezing) readRest(ctx context.Context) error {
	var chunk, entries int64
	err := f.conn.QueryRow(ctx, sql.DrawsLastChunk, f.SaleID).Scan(&chunk, &entries, &f.last)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
	case err != nil:
		return err
	default:
		f.chunks, f.count = chunk+1, chunk*draw.ChunkLeaves+entries
	}
	// Only the last chunk of a list is short.
	for f.count == f.chunks*draw.ChunkLeaves {
		read, err := f.readPortion(ctx)
		if err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.DrawPortion)
		if read == 0 {
			return nil
		}
	}
	return nil
}

// readPortion adds the next chunks, and returns how many.
func (f *freezing) readPortion(ctx context.Context) (int, error) {
	// Its error comes with the rows. Postgres plans it for these parameters.
	rows, _ := f.conn.Query(ctx, sql.DrawsEntries, pgx.QueryExecModeCacheDescribe, f.EntriesID, f.last, f.ClosesAt,
		portionChunks*draw.ChunkLeaves)
	var chunks []*chunk
	entry := order.Receipt{SaleID: f.EntriesID}
	_, err := pgx.ForEachRow(rows, []any{
		&entry.OrderID, &entry.User, &entry.Quantity, &entry.Lines, &entry.Sequence, &entry.Epoch, &entry.ReservedAt,
	}, func() error {
		record, err := draw.NewRecord(entry)
		if err != nil {
			return fmt.Errorf("order %s: %w", entry.OrderID, err)
		}
		if f.count%draw.ChunkLeaves == 0 {
			chunks = append(chunks, &chunk{number: f.chunks, first: entry.OrderID})
			f.chunks++
		}
		chunks[len(chunks)-1].add(entry.OrderID, record)
		f.count++
		f.last = entry.OrderID
		return nil
	})
	if err != nil || len(chunks) == 0 {
		return 0, err
	}
	_, err = f.conn.CopyFrom(ctx, pgx.Identifier{"draw_chunks"},
		[]string{"sale_id", "chunk", "first_id", "records", "ids", "hash"},
		pgx.CopyFromSlice(len(chunks), func(i int) ([]any, error) {
			c := chunks[i]
			hash := c.tree.Root()
			return []any{f.SaleID, c.number, c.first, c.records, c.ids, hash[:]}, nil
		}))
	return len(chunks), err
}

type chunk struct {
	number       int64
	first        uuid.UUID
	records, ids []byte
	tree         draw.Tree
}

func (c *chunk) add(id uuid.UUID, record draw.Record) {
	if c.records == nil {
		c.records = make([]byte, 0, draw.ChunkLeaves*draw.RecordBytes)
		c.ids = make([]byte, 0, draw.ChunkLeaves*len(id))
	}
	c.records, c.ids = append(c.records, record[:]...), append(c.ids, id[:]...)
	c.tree.Add(record.Leaf())
}

// freeze is the last step. It locks both sales, so that no entry is added or cancelled before its end, and no lock is
// waited for once the clock is read. The goods come first, as in catalog.CreateDraw.
func (f *freezing) freeze(ctx context.Context, tx pgx.Tx, d *Draw) error {
	if d.State != Freezing {
		return nil
	}
	for _, sale := range []uuid.UUID{d.SaleID, d.EntriesID} {
		if err := tx.QueryRow(ctx, sql.CatalogLockSale, sale).Scan(nil); err != nil {
			return err
		}
	}
	var sold, cancelled int64
	err := tx.QueryRow(ctx, sql.DrawsLiveEntries, d.EntriesID, d.ClosesAt, f.count).Scan(&sold, &cancelled)
	if err != nil {
		return err
	}
	// Each entry of the list is live, or was cancelled since the end. So the list has each live one if it has as many.
	if f.count != sold+cancelled {
		return fmt.Errorf("%w: it has %d entries, and there are %d live orders and %d that were cancelled since the end",
			errChanged, f.count, sold, cancelled)
	}
	rows, _ := tx.Query(ctx, sql.DrawsHashes, d.SaleID) // its error comes with the rows
	hashes, err := pgx.CollectRows(rows, scanHash)
	if err != nil {
		return err
	}
	if int64(len(hashes)) != f.chunks {
		return fmt.Errorf("%w: it has %d chunks, want %d", errChanged, len(hashes), f.chunks)
	}
	if _, err := tx.Exec(ctx, sql.DrawsLowerEntries, d.EntriesID); err != nil {
		return err
	}
	margin := min(commitMargin, d.Freeze/2)
	if err := pg.Run(ctx, f.conn, fmt.Sprintf("SET LOCAL statement_timeout = %[1]d; "+
		"SET LOCAL idle_in_transaction_session_timeout = %[1]d", (margin/marginSteps).Milliseconds())); err != nil {
		return err
	}
	return f.note(ctx, tx, d, draw.RootOf(hashes), margin)
}

// note freezes the list in Postgres, and tells the world its root.
func (f *freezing) note(ctx context.Context, tx pgx.Tx, d *Draw, root draw.Hash, margin time.Duration) error {
	var now time.Time
	if err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now); err != nil {
		return err
	}
	var round *int64
	var rounds []int64
	if len(d.Parties) == 0 {
		if rounds = draw.Rounds(d.ClosesAt, d.Freeze, now); rounds == nil {
			return void(ctx, tx, d, reasonLate)
		}
		round = &rounds[len(rounds)-1]
		if draw.RoundTime(*round).Sub(now) < margin {
			return errRoundComes
		}
	}
	batch := new(pgx.Batch)
	batch.Queue(sql.DrawsFreeze, d.SaleID, f.count, root[:], now, round)
	batch.Queue(sql.DrawsAddEvent, d.SaleID, eventFrozen, draw.Frozen{
		EntriesSaleID: d.EntriesID, Entries: f.count, Root: root[:], FrozenAt: now.UTC(), Rounds: rounds,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), Parties: d.Parties,
	})
	err := tx.SendBatch(ctx, batch).Close()
	crashpoint.Hit(crashpoint.DrawFrozen)
	return err
}

func scanHash(row pgx.CollectableRow) (hash draw.Hash, err error) {
	var raw []byte
	err = row.Scan(&raw)
	copy(hash[:], raw)
	return hash, err
}
