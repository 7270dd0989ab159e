package draws

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// Proof tells an entrant their part in a draw.
type Proof struct {
	Place  int64
	Record draw.Record
	// Path proves that the leaf of the record is at the place in the list with the root of the draw: tlog.CheckRecord.
	Path tlog.RecordProof
	// Entries and Root are those of the list.
	Entries int64
	Root    draw.Hex
	// Item is the code of the item of the entry; empty in a sale without items.
	Item string
	// Rank counts from 0 among the entries of the item; nil before they are ranked.
	Rank *int64
	// Outcome is empty until the rank has had its turn. Reason says why it was skipped, and OrderID is the order that was
	// made of the offer.
	Outcome draw.Outcome
	Reason  draw.Reason
	OrderID uuid.UUID
}

// FindDraw returns the draw of a sale. The error is ErrNoDraw, also for a waiting list.
func (s *Store) FindDraw(ctx context.Context, goods uuid.UUID) (Draw, error) {
	d, err := s.Find(ctx, goods)
	if err == nil && d.Kind != ByHash {
		err = ErrNoDraw
	}
	return d, err
}

// Proof returns the proof for the order of a receipt. It does not look at the signature. The caller compares
// Proof.Record with the receipt's own record. The error is ErrNoDraw, ErrNotFrozen, ErrVoid if it was never frozen,
// or ErrNoEntry.
func (s *Store) Proof(ctx context.Context, goods uuid.UUID, r order.Receipt) (p Proof, err error) {
	d, err := s.findFrozen(ctx, goods)
	if err == nil {
		p, err = s.prove(ctx, &d, r)
	}
	return p, wrap("prove an entry", goods, err)
}

func (s *Store) findFrozen(ctx context.Context, goods uuid.UUID) (Draw, error) {
	d, err := s.FindDraw(ctx, goods)
	if err == nil && d.FrozenAt.IsZero() {
		if err = ErrNotFrozen; d.State == Void {
			err = ErrVoid
		}
	}
	return d, err
}

func (s *Store) prove(ctx context.Context, d *Draw, r order.Receipt) (Proof, error) {
	if r.SaleID != d.EntriesID {
		return Proof{}, ErrNoEntry
	}
	rows, _ := s.pool.Query(ctx, sql.DrawsProve, d.SaleID, r.OrderID) // its error comes with the rows
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
		Chunk        int64
		Records, IDs []byte
		OrderID      zeronull.UUID
		Reason       draw.Reason
		Decided      bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		return Proof{}, ErrNoEntry
	} else if err != nil {
		return Proof{}, err
	}
	ids := slices.Collect(slices.Chunk(found.IDs, len(r.OrderID)))
	n, isIn := slices.BinarySearchFunc(ids, r.OrderID[:], bytes.Compare)
	if !isIn {
		return Proof{}, ErrNoEntry
	}
	p := Proof{
		Place: found.Chunk*draw.ChunkLeaves + int64(n), Entries: d.Entries, Root: d.Root,
		Record: asRecord(found.Records[n*draw.RecordBytes:]),
	}
	if p.Path, err = s.path(ctx, d, found.Records, p.Place); err != nil {
		return Proof{}, err
	}
	for i, item := range d.Items {
		if order.ItemLetter(i)[0] == p.Record[0] {
			p.Item = item.Code
		}
	}
	if !d.RankedAt.IsZero() {
		if err := s.pool.QueryRow(ctx, sql.DrawsRankOf, d.SaleID, found.Chunk, n).Scan(&p.Rank); err != nil {
			return Proof{}, err
		}
	}
	if found.Decided {
		p.OrderID, p.Outcome, p.Reason = uuid.UUID(found.OrderID), outcome(found.Reason), found.Reason
	}
	return p, nil
}

func outcome(skipped draw.Reason) draw.Outcome {
	if skipped != "" {
		return draw.Skipped
	}
	return draw.Offered
}

func (s *Store) path(ctx context.Context, d *Draw, records []byte, place int64) (tlog.RecordProof, error) {
	hashes, err := s.hashes.of(ctx, s.pool, d.SaleID)
	if err != nil {
		return nil, err
	}
	leaves := make([]draw.Hash, 0, draw.ChunkLeaves)
	for record := range slices.Chunk(records, draw.RecordBytes) {
		leaves = append(leaves, asRecord(record).Leaf())
	}
	return draw.Prove(hashes, leaves, place)
}

// hashCache has the roots of the chunks of frozen lists, which never change: 32 bytes for 1,024 entries.
type hashCache struct {
	mu    sync.Mutex
	lists map[uuid.UUID][]draw.Hash
}

// hashesMax bounds the lists of a hashCache.
const hashesMax = 8

func (c *hashCache) of(ctx context.Context, on pg.Querier, goods uuid.UUID) ([]draw.Hash, error) {
	c.mu.Lock()
	known := c.lists[goods]
	c.mu.Unlock()
	if known != nil {
		return known, nil
	}
	rows, _ := on.Query(ctx, sql.DrawsHashes, goods) // its error comes with the rows
	hashes, err := pgx.CollectRows(rows, scanHash)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lists == nil || len(c.lists) >= hashesMax {
		c.lists = map[uuid.UUID][]draw.Hash{}
	}
	c.lists[goods] = hashes
	return hashes, nil
}

// Leaves writes the list: the records of all entries by place, Draw.Entries times draw.RecordBytes. It keeps no
// transaction open while it writes, so w may be slow. The error is one of FrozenList, or that of w.
func (s *Store) Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	list, err := s.FrozenList(ctx, goods)
	if err == nil {
		_, err = io.Copy(w, list)
	}
	return wrap("write the entries", goods, err)
}

// FrozenList is the list of a frozen draw, as Leaves writes it. It is read from Postgres in portions.
type FrozenList struct {
	Root draw.Hex
	*io.SectionReader
}

// ListBytes is the length of the list.
func (d *Draw) ListBytes() int64 { return d.Entries * draw.RecordBytes }

// FrozenList returns the list of a draw, for one goroutine and until ctx ends. The error is ErrNoDraw, ErrNotFrozen,
// or ErrVoid if the list was never frozen.
func (s *Store) FrozenList(ctx context.Context, goods uuid.UUID) (*FrozenList, error) {
	d, err := s.findFrozen(ctx, goods)
	if err != nil {
		return nil, err
	}
	list := &portions{read: func(from int64, do func([]byte) error) error {
		return eachChunk(ctx, s.pool, goods, from, do)
	}}
	return &FrozenList{d.Root, io.NewSectionReader(list, 0, d.ListBytes())}, nil
}

const chunkBytes = draw.ChunkLeaves * draw.RecordBytes

// portions reads the records of a list, of which it keeps the latest portion.
type portions struct {
	read   func(chunk int64, do func(records []byte) error) error
	latest []byte
	at     int64
}

// ReadAt implements io.ReaderAt.
func (p *portions) ReadAt(to []byte, at int64) (n int, err error) {
	for n < len(to) && err == nil {
		next := at + int64(n)
		if next < p.at || next >= p.at+int64(len(p.latest)) {
			err = p.load(next)
			continue
		}
		n += copy(to[n:], p.latest[next-p.at:])
	}
	return n, err
}

// load reads the portion that begins with the chunk of a byte.
func (p *portions) load(at int64) error {
	chunk := at / chunkBytes
	p.at, p.latest = chunk*chunkBytes, p.latest[:0]
	err := p.read(chunk, func(records []byte) error {
		p.latest = append(p.latest, records...)
		return nil
	})
	if err == nil && at >= p.at+int64(len(p.latest)) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// offersPage is how many ranks are read at a time.
const offersPage = 10_000

// Bundle returns all that is public about a draw but its list. The error is one of FrozenList.
func (s *Store) Bundle(ctx context.Context, goods uuid.UUID) (*draw.Bundle, error) {
	b := new(draw.Bundle)
	// Before all else: a bundle has each step up to its revision.
	err := s.pool.QueryRow(ctx, sql.DrawsStock, goods).Scan(&b.Revision, &b.Stock, &b.Items, &b.Restocks)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil // as findFrozen says
	}
	if err != nil {
		return nil, wrap("make the bundle", goods, err)
	}
	d, err := s.findFrozen(ctx, goods)
	if err != nil {
		return nil, wrap("make the bundle", goods, err)
	}
	*b = draw.Bundle{
		Version: d.Version, SaleID: d.SaleID, EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), FrozenAt: d.FrozenAt, Rounds: d.Rounds,
		Stock: b.Stock, Items: b.Items, Offers: []draw.Offer{}, VoidReason: d.VoidReason,
		Revision: b.Revision, Goods: d.Goods, Restocks: b.Restocks, VoidedAt: d.VoidedAt,
	}
	for i := range b.Restocks {
		b.Restocks[i].At = b.Restocks[i].At.UTC()
	}
	if !d.SeededAt.IsZero() {
		b.Seed = &draw.Source{Kind: draw.SeedDrand, Round: d.Round(), Signature: d.Signature, Parties: d.Parties}
		if len(d.Parties) > 0 {
			b.Seed.Kind = draw.SeedParties
		}
	} else {
		b.Parties = d.Parties
	}
	if !d.PublishesGoods() { // as its verifiers know it
		b.Revision, b.Goods, b.Restocks, b.Parties, b.VoidedAt = 0, nil, nil, nil, time.Time{}
	}
	for i := range d.ItemEntries {
		letter, code := d.item(i)
		if b.Offers, err = s.offers(ctx, goods, letter, code, b.Offers); err != nil {
			return nil, wrap("make the bundle", goods, err)
		}
	}
	return b, nil
}

// offers appends what became of the ranks of an item.
func (s *Store) offers(
	ctx context.Context, goods uuid.UUID, letter, code string, to []draw.Offer,
) ([]draw.Offer, error) {
	o := draw.Offer{Rank: -1, Item: code}
	for page := offersPage; page == offersPage; {
		page = 0
		rows, _ := s.pool.Query(ctx, sql.DrawsOffers, goods, letter, o.Rank+1, offersPage) // rows carry the error
		if _, err := pgx.ForEachRow(rows, []any{&o.Rank, &o.Place, &o.Reason}, func() error {
			page++
			o.Outcome = outcome(o.Reason)
			to = append(to, o)
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return to, nil
}
