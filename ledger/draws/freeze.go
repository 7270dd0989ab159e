package draws

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// portionChunks is how many chunks are read, and written, at a time: it bounds the memory of a freeze.
const portionChunks = 64

// commitMargin is how long before a round the clocks must be read, or half a freeze if that is shorter. A later list is
// frozen after the round, for the next one. Once they are read, Postgres ends the transaction if a statement or a
// silence takes an eighth of the margin. There are six of them, and the commit has the rest of the time.
const (
	commitMargin = 10 * time.Second
	marginSteps  = 8
)

var (
	// errChanged is returned for a list that differs from the live orders: it begins again.
	errChanged = errors.New("the list is not that of the live orders")
	// errRoundComes is returned just before a round, and if one comes, or the entries are not over, by one of the clocks.
	errRoundComes = errors.New("a round comes before the list can be frozen")
)

// silenceMax is how long the session that freezes or ranks may be silent before Postgres ends it: longer than it
// takes to sort the entries of the largest draw.
const silenceMax = 2 * time.Minute

// Prepare freezes and ranks the draw of the sale as far as it can: the entries are final if that is true. One process
// at a time does so for a draw; the others return pg.ErrLockHeld.
func (s *Store) Prepare(ctx context.Context, goods uuid.UUID, read Clocks) error {
	lock, err := pg.Begin(ctx, s.pool, pg.DrawLock(goods), silenceMax)
	if err != nil {
		return err
	}
	defer lock.End()
	// Without statistics, as in the first minutes of a sale, Postgres would sort all entries for each part of them.
	if err := lock.Run(ctx, "SET enable_sort = off"); err != nil {
		return err
	}
	if err := s.freeze(ctx, lock.Conn, goods, read); err != nil {
		return err
	}
	return s.rank(ctx, lock.Conn, goods)
}

// freeze freezes the list of the entries, all of which must be final: over, in Postgres, and unable to become others.
// So none is added later; it also asks for a stock of the entries sale that leaves nothing. It makes the draw void if
// the last round is over. After a crash it goes on with the next part of the list. It does nothing in another state.
//
// The caller excludes other calls (pg.DrawLock). Two at once harm nothing: one of them fails.
func (s *Store) freeze(ctx context.Context, conn *pgx.Conn, goods uuid.UUID, read Clocks) error {
	d, err := find(ctx, conn, goods)
	if err != nil || d.State != Freezing {
		return err
	}
	f := &freezing{Draw: &d, conn: conn, read: read}
	if len(d.Root) == 0 {
		if err := f.list(ctx); err != nil {
			return err
		}
	}
	crashpoint.Hit(crashpoint.DrawListed)
	_, err = change(ctx, conn, goods, func(tx pgx.Tx, d *Draw) error { return f.confirm(ctx, tx, d) })
	if err != nil && !errors.Is(err, errRoundComes) { // the next try is after it
		return fmt.Errorf("confirm the frozen list of sale=%s: %w", goods, err)
	}
	return nil
}

// list commits the list and its root.
func (f *freezing) list(ctx context.Context) error {
	goods := f.SaleID
	if err := f.readRest(ctx); err != nil {
		return fmt.Errorf("read the entries of sale=%s: %w", goods, err)
	}
	_, err := change(ctx, f.conn, goods, func(tx pgx.Tx, d *Draw) error { return f.freeze(ctx, tx, d) })
	switch {
	case errors.Is(err, errRoundComes):
		return nil // the next try is after it
	case errors.Is(err, errChanged):
		_, forgotten := f.conn.Exec(ctx, sql.DrawsBeginAgain, goods)
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
	read Clocks
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
// waited for once the clocks are read. The goods come first, as in catalog.CreateDraw.
func (f *freezing) freeze(ctx context.Context, tx pgx.Tx, d *Draw) error {
	if d.State != Freezing || len(d.Root) > 0 {
		return nil
	}
	root, err := f.final(ctx, tx, d)
	if err != nil {
		return err
	}
	return f.note(ctx, tx, d, root)
}

// final returns the root of the list once that has all live entries.
func (f *freezing) final(ctx context.Context, tx pgx.Tx, d *Draw) (root draw.Hash, err error) {
	for _, sale := range []uuid.UUID{d.SaleID, d.EntriesID} {
		if err := tx.QueryRow(ctx, sql.CatalogLockSale, sale).Scan(nil); err != nil {
			return root, err
		}
	}
	var sold, cancelled int64
	err = tx.QueryRow(ctx, sql.DrawsLiveEntries, d.EntriesID, d.ClosesAt, f.count).Scan(&sold, &cancelled)
	if err != nil {
		return root, err
	}
	// Each entry of the list is live, or was cancelled since the end. So the list has each live one if it has as many.
	if f.count != sold+cancelled {
		return root, fmt.Errorf("%w: it has %d entries, and there are %d live orders and %d that were cancelled "+
			"since the end", errChanged, f.count, sold, cancelled)
	}
	rows, _ := tx.Query(ctx, sql.DrawsHashes, d.SaleID) // its error comes with the rows
	hashes, err := pgx.CollectRows(rows, scanHash)
	if err != nil {
		return root, err
	}
	if int64(len(hashes)) != f.chunks {
		return root, fmt.Errorf("%w: it has %d chunks, want %d", errChanged, len(hashes), f.chunks)
	}
	if _, err := tx.Exec(ctx, sql.DrawsLowerEntries, d.EntriesID); err != nil {
		return root, err
	}
	return draw.RootOf(hashes), nil
}

// note freezes the list in Postgres. From its commit on the root is public, and final.
func (f *freezing) note(ctx context.Context, tx pgx.Tx, d *Draw, root draw.Hash) error {
	now, _, err := f.inTime(ctx, tx, d, min(commitMargin, d.Freeze/2))
	if err != nil || now.IsZero() {
		return err
	}
	_, err = tx.Exec(ctx, sql.DrawsFreeze, d.SaleID, f.count, root[:], now)
	crashpoint.Hit(crashpoint.DrawFrozen)
	return err
}

// confirm reads the clocks once the root is committed, however long that took, and tells the world that time: so the
// root was public before it, and the round that gives the seed comes after it.
func (f *freezing) confirm(ctx context.Context, tx pgx.Tx, d *Draw) error {
	if d.State != Freezing || len(d.Root) == 0 {
		return nil
	}
	goods, err := d.goods(ctx, tx)
	if err != nil {
		return err
	}
	now, rounds, err := f.inTime(ctx, tx, d, clocks.ApartMax)
	if err != nil || now.IsZero() {
		return err
	}
	batch := new(pgx.Batch)
	frozen := draw.Frozen{
		Version: d.Version, EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root, FrozenAt: now.UTC(), Rounds: rounds,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), Parties: d.Parties, Goods: goods,
	}
	d.publish(batch, &frozen, frozen)
	return tx.SendBatch(ctx, batch).Close()
}

// publish queues the time and the round of a list that is frozen, and the event that tells them.
func (d *Draw) publish(batch *pgx.Batch, frozen *draw.Frozen, event any) {
	var round *int64
	if n := len(frozen.Rounds); n > 0 {
		round = &frozen.Rounds[n-1]
	}
	batch.Queue(sql.DrawsConfirm, d.SaleID, frozen.FrozenAt, round)
	batch.Queue(sql.DrawsAddEvent, d.SaleID, eventFrozen, event)
}

// goods returns what is published of the units of the draw. It locks the sale, so that they are those before its next
// revision; nil in version 1. Nobody has bought a unit since the draw was created, and each order from before is in
// Postgres (fulfillment/offers).
func (d *Draw) goods(ctx context.Context, tx pgx.Tx) (*draw.Goods, error) {
	if !d.PublishesGoods() {
		return nil, nil
	}
	if err := tx.QueryRow(ctx, sql.CatalogLockSale, d.SaleID).Scan(nil); err != nil {
		return nil, err
	}
	g := new(draw.Goods)
	err := tx.QueryRow(ctx, sql.DrawsGoods, d.SaleID).Scan(&g.Revision, &g.Stock, &g.Sold, &g.Items)
	if err != nil || g.Sold == 0 {
		return g, err
	}
	rows, _ := tx.Query(ctx, sql.DrawsHolders, d.SaleID, d.EntriesID) // its error comes with the rows
	g.Holders, err = pgx.CollectRows(rows, pgx.RowTo[draw.Place])
	return g, err
}

// inTime returns the time by the clock that is furthest ahead, and the rounds that follow from it, none with parties.
// With less than the margin before the round it fails with errRoundComes. If the last one is over it makes the draw
// void, and the time is zero. From then on Postgres ends the transaction soon.
func (f *freezing) inTime(
	ctx context.Context, tx pgx.Tx, d *Draw, margin time.Duration,
) (now time.Time, rounds []int64, err error) {
	step := min(commitMargin, d.Freeze/2) / marginSteps
	err = pg.Run(ctx, f.conn, fmt.Sprintf("SET LOCAL statement_timeout = %[1]d; "+
		"SET LOCAL idle_in_transaction_session_timeout = %[1]d", step.Milliseconds()))
	if err != nil {
		return now, nil, err
	}
	times, err := f.read(ctx, tx)
	if err != nil {
		return now, nil, err
	}
	switch reason := d.late(times.Earliest); {
	case times.Earliest.Before(d.ClosesAt):
		return now, nil, errRoundComes
	case reason != "":
		return now, nil, void(ctx, tx, d, reason)
	}
	// The list is frozen in time by each of the clocks.
	now = times.Latest.Round(time.Microsecond) // as Postgres keeps it
	if len(d.Parties) == 0 {
		rounds = draw.Rounds(d.ClosesAt, d.Freeze, now)
		if rounds == nil || draw.RoundTime(rounds[len(rounds)-1]).Sub(now) < margin {
			return time.Time{}, nil, errRoundComes
		}
	}
	return now, rounds, nil
}

func scanHash(row pgx.CollectableRow) (hash draw.Hash, err error) {
	var raw []byte
	err = row.Scan(&raw)
	copy(hash[:], raw)
	return hash, err
}

// ErrNotRestored is returned for what cannot be what was published of the draw: by its terms, or because the entries in
// Postgres make another list.
var ErrNotRestored = errors.New("it is not what was published of this draw, or entries of it are missing")

// Restore takes back what was published of the frozen list of a draw, after Postgres was restored from a time before
// it. It is what a receiver of the relay or a witness kept; the entries must make the same list. The time and the round
// are those that were published then. A repeat changes nothing. The error is ErrNoDraw, ErrVoid, pg.ErrLockHeld while a
// worker freezes the list, or ErrNotRestored.
func (s *Store) Restore(ctx context.Context, goods uuid.UUID, kept *draw.Frozen, operator string) (Draw, error) {
	lock, err := pg.Begin(ctx, s.pool, pg.DrawLock(goods), silenceMax)
	if err != nil {
		return Draw{}, wrap("restore the list", goods, err)
	}
	defer lock.End()
	d, err := find(ctx, lock.Conn, goods)
	if err == nil && d.Kind != ByHash {
		err = ErrNoDraw
	}
	f := &freezing{Draw: &d, conn: lock.Conn}
	if err == nil && d.State == Freezing {
		err = f.readRest(ctx)
	}
	if err != nil {
		return d, wrap("restore the list", goods, err)
	}
	d, err = change(ctx, lock.Conn, goods, func(tx pgx.Tx, d *Draw) error {
		return f.restore(ctx, tx, d, kept, operator)
	})
	if errors.Is(err, errChanged) || errors.Is(err, ErrNotRestored) {
		_, forgotten := lock.Conn.Exec(ctx, sql.DrawsBeginAgain, goods)
		err = errors.Join(err, forgotten)
	}
	return d, wrap("restore the list", goods, err)
}

func (f *freezing) restore(ctx context.Context, tx pgx.Tx, d *Draw, kept *draw.Frozen, operator string) error {
	own := draw.Frozen{
		Version: d.Version, Goods: d.Goods,
		SaleID: kept.SaleID, EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root, FrozenAt: d.FrozenAt,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), Parties: d.Parties,
	}
	if own.SaleID != uuid.Nil { // the data of an event has none
		own.SaleID = d.SaleID
	}
	switch {
	case d.State == Void:
		return ErrVoid
	case d.State == Entering:
		return fmt.Errorf("%w: the entries are not over", ErrNotRestored)
	case d.State == Freezing:
		root, err := f.final(ctx, tx, d)
		if err != nil {
			return err
		}
		own.Entries, own.Root, own.FrozenAt = f.count, root[:], kept.FrozenAt
		if own.Goods, err = d.goods(ctx, tx); err != nil {
			return err
		}
		if own.Goods != nil && kept.Goods != nil { // what was sold then may have ended meanwhile
			own.Goods.Revision, own.Goods.Sold, own.Goods.Holders = kept.Goods.Revision, kept.Goods.Sold, kept.Goods.Holders
			for i := range min(len(own.Goods.Items), len(kept.Goods.Items)) {
				own.Goods.Items[i].Sold = kept.Goods.Items[i].Sold
			}
		}
	}
	if len(d.Parties) == 0 {
		own.Rounds = draw.Rounds(d.ClosesAt, d.Freeze, own.FrozenAt)
	}
	if differs := kept.Difference(&own); differs != "" {
		return fmt.Errorf("%w: it has %s", ErrNotRestored, differs)
	}
	if d.State != Freezing {
		return nil
	}
	if len(d.Parties) == 0 && own.Rounds == nil || own.FrozenAt.Before(d.ClosesAt) {
		return fmt.Errorf("%w: a list was never frozen at that time", ErrNotRestored)
	}
	own.SaleID = uuid.Nil
	batch := new(pgx.Batch)
	batch.Queue(sql.DrawsFreeze, d.SaleID, own.Entries, []byte(own.Root), own.FrozenAt)
	d.publish(batch, &own, struct {
		draw.Frozen
		RestoredBy string `json:"restored_by"`
	}{own, operator})
	return tx.SendBatch(ctx, batch).Close()
}
