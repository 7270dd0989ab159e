package draws

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
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

// Proof returns the proof for a receipt whose signature the caller has verified. The error is ErrNoDraw, ErrNotFrozen,
// or ErrNoEntry.
func (s *Store) Proof(ctx context.Context, goods uuid.UUID, r order.Receipt) (p Proof, err error) {
	d, err := s.findFrozen(ctx, goods)
	if err == nil {
		p, err = s.prove(ctx, &d, r)
	}
	return p, wrap("prove an entry", goods, err)
}

func (s *Store) findFrozen(ctx context.Context, goods uuid.UUID) (Draw, error) {
	d, err := s.Find(ctx, goods)
	if err == nil && d.FrozenAt.IsZero() {
		err = ErrNotFrozen
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
	rows, _ := s.pool.Query(ctx, sql.DrawsHashes, d.SaleID) // its error comes with the rows
	hashes, err := pgx.CollectRows(rows, scanHash)
	if err != nil {
		return nil, err
	}
	leaves := make([]draw.Hash, 0, draw.ChunkLeaves)
	for record := range slices.Chunk(records, draw.RecordBytes) {
		leaves = append(leaves, asRecord(record).Leaf())
	}
	return draw.Prove(hashes, leaves, place)
}

// Leaves writes the list: the records of all entries by place, Draw.Entries times draw.RecordBytes. It keeps no
// transaction open while it writes, so w may be slow. The error is ErrNoDraw, ErrNotFrozen, or that of w.
func (s *Store) Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	d, err := s.findFrozen(ctx, goods)
	for from := int64(0); err == nil && from*draw.ChunkLeaves < d.Entries; from += portionChunks {
		var portion []byte
		err = eachChunk(ctx, s.pool, goods, from, func(records []byte) error {
			portion = append(portion, records...)
			return nil
		})
		if err == nil {
			_, err = w.Write(portion)
		}
	}
	return wrap("write the entries", goods, err)
}

// offersPage is how many ranks are read at a time.
const offersPage = 10_000

// Bundle returns all that is public about a draw but its list. The error is ErrNoDraw or ErrNotFrozen.
func (s *Store) Bundle(ctx context.Context, goods uuid.UUID) (*draw.Bundle, error) {
	d, err := s.findFrozen(ctx, goods)
	if err != nil {
		return nil, wrap("make the bundle", goods, err)
	}
	b := &draw.Bundle{
		Version: draw.BundleVersion, SaleID: d.SaleID, EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root,
		ClosesAt: d.ClosesAt, FreezeSeconds: int64(d.Freeze / time.Second), FrozenAt: d.FrozenAt, Rounds: d.Rounds,
		Stock: d.Stock, Items: d.Items, Offers: []draw.Offer{}, VoidReason: d.VoidReason,
	}
	if !d.SeededAt.IsZero() {
		b.Seed = &draw.Source{Kind: draw.SeedDrand, Round: d.Round(), Signature: d.Signature, Parties: d.Parties}
		if len(d.Parties) > 0 {
			b.Seed.Kind = draw.SeedParties
		}
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
