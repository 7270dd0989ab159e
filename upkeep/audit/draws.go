package audit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/format"
	"stampede/ledger/draws"
	"stampede/reservation/order"
	"stampede/sql"
)

// DrawFigures are the figures of a draw or a waiting list.
type DrawFigures struct {
	// SaleID is the sale whose units are offered.
	SaleID uuid.UUID `json:"sale_id"`
	Kind   string    `json:"kind"`
	// Entries is the length of the frozen list, 0 while there is none.
	Entries int64 `json:"entries"`
	Offered int64 `json:"offered"`
	Skipped int64 `json:"skipped"`
	Frozen  bool  `json:"frozen"`
	Ranked  bool  `json:"ranked"`
	// Late are up to 100 entries of a waiting list whose turn came after those of later places. D5 is kept if they came to
	// Postgres after those turns, as one that was parked does.
	Late []uuid.UUID `json:"late_entries,omitempty"`
}

// auditedDraw is a row of draws.sql.
type auditedDraw struct {
	SaleID, EntriesID     uuid.UUID
	Kind                  string
	FreezeSeconds         int64
	Parties               []draw.Party
	Version               int
	Entries               int64
	Root, Signature, Seed []byte
	FrozenAt, SeededAt    *time.Time
	RankedAt, ClosesAt    *time.Time
	Round                 int64
	ItemEntries           []int64
	Offered, Skipped      int64
	// Archived is true if the orders of the entries are in a file.
	Archived, WithItems            bool
	FrozenRevision, SeededRevision int64
	// Created, Published and Revealed are the data of the events DrawCreated, DrawFrozen and DrawSeeded.
	Created, Published *draw.Frozen
	Revealed           *draw.Seeded
	Late               []uuid.UUID
	// Logged is what Published.Goods follows from, with all orders from before, live or not; nil in version 1.
	Logged *draw.Goods
}

// ofDraws reports whether a promise is one of draws. A report without draws does not have it.
func (p Promise) ofDraws() bool { return p.Name[0] == 'D' && p.Name != "DB" }

// checkDraws checks of each draw what no query can: the list and its root (D1), that it was frozen before its seed
// (D3), the ranks (D4), and that the turns were by rank (D5).
func (l *findings) checkDraws(ctx context.Context, tx pgx.Tx) error {
	var found []auditedDraw
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) (err error) {
		rows, _ := tx.Query(ctx, sql.AuditDraws) // its error comes with the rows
		found, err = pgx.CollectRows(rows, pgx.RowToStructByName[auditedDraw])
		return err
	})
	if l.isFatal(ctx, err) {
		return fmt.Errorf("list draws: %w", err)
	} else if err != nil {
		for _, promise := range []string{"D1", "D3", "D4", "D5"} {
			l.noteUnchecked(promise, err)
		}
		return nil
	}
	if len(found) == 0 {
		l.report.Promises = slices.DeleteFunc(l.report.Promises, Promise.ofDraws)
		return nil
	}
	for i := range found {
		d := &drawCheck{findings: l, auditedDraw: &found[i], tx: tx}
		l.report.Draws = append(l.report.Draws, DrawFigures{
			SaleID: d.SaleID, Kind: d.Kind, Entries: d.Entries, Offered: d.Offered, Skipped: d.Skipped,
			Frozen: d.FrozenAt != nil, Ranked: d.RankedAt != nil, Late: d.Late,
		})
		if d.Kind == "draw" {
			d.checkTerms()
		}
		if d.FrozenAt == nil {
			continue
		}
		// Nobody gives a seed to a list whose time is not proved yet.
		if d.Published != nil || d.SeededAt != nil {
			d.checkFreeze()
		}
		for _, c := range []struct {
			promises []string
			do       func(context.Context) error
		}{{[]string{"D1"}, d.checkList}, {[]string{"D4", "D5"}, d.checkRanks}} {
			err := pgx.BeginFunc(ctx, tx, func(pgx.Tx) error { return c.do(ctx) })
			if l.isFatal(ctx, err) {
				return fmt.Errorf("check %s of sale=%s: %w", c.promises, d.SaleID, err)
			}
			for _, promise := range c.promises {
				if err != nil {
					l.noteUnchecked(promise, err)
				}
			}
		}
	}
	return nil
}

// drawCheck is the check of a frozen draw.
type drawCheck struct {
	*findings
	*auditedDraw
	tx pgx.Tx
	// isWhole is true if the list has the root of the draw, so that ranks follow from it.
	isWhole bool
}

func (d *drawCheck) found(promise, format string, a ...any) {
	d.note(promise, Finding{Sale: &d.SaleID, Remedy: remedyDraw, What: fmt.Sprintf(format, a...)})
}

// checkTerms compares the terms of a draw with those that were published when it was created.
func (d *drawCheck) checkTerms() {
	if d.Created == nil {
		d.found("D3", "there is no event DrawCreated")
		return
	}
	row := draw.Frozen{Version: d.Version, EntriesSaleID: d.EntriesID, FreezeSeconds: d.FreezeSeconds, Parties: d.Parties}
	created := draw.Frozen{
		Version:       d.Created.Version,
		EntriesSaleID: d.Created.EntriesSaleID, FreezeSeconds: d.Created.FreezeSeconds, Parties: d.Created.Parties,
	}
	if differs := created.Difference(&row); differs != "" {
		d.found("D3", "the event DrawCreated has %s", differs)
	}
	if d.Published != nil && d.FrozenAt == nil {
		d.found("D3", "there is an event DrawFrozen, and the list is not frozen")
	}
}

// checkFreeze checks that the list was frozen, and its root published, when nobody could know the seed.
func (d *drawCheck) checkFreeze() {
	frozenAt, rfc := d.FrozenAt.UTC(), time.RFC3339
	if d.ClosesAt == nil {
		d.ClosesAt = new(time.Time)
	}
	var rounds []int64
	if len(d.Parties) == 0 {
		rounds = draw.Rounds(*d.ClosesAt, time.Duration(d.FreezeSeconds)*time.Second, frozenAt)
	}
	switch {
	case d.Published == nil:
		d.found("D3", "the list was frozen at %s, and there is no event DrawFrozen", frozenAt.Format(rfc))
	case d.SeededAt != nil && d.SeededRevision < d.FrozenRevision:
		d.found("D3", "the seed was published at revision %d, and the root of the list at %d", d.SeededRevision,
			d.FrozenRevision)
	default:
		row := draw.Frozen{
			Version:       d.Version,
			EntriesSaleID: d.EntriesID, Entries: d.Entries, Root: d.Root, FrozenAt: frozenAt, Rounds: rounds,
			ClosesAt: *d.ClosesAt, FreezeSeconds: d.FreezeSeconds, Parties: d.Parties, Goods: d.publishedGoods(),
		}
		if differs := d.Published.Difference(&row); differs != "" {
			d.found("D3", "the event DrawFrozen has %s", differs)
		}
	}
	at := draw.RoundTime(d.Round)
	switch {
	case frozenAt.Before(*d.ClosesAt) || d.ClosesAt.IsZero():
		d.found("D3", "the list was frozen at %s, when the entries had not closed", frozenAt.Format(rfc))
	case len(d.Parties) > 0:
		if d.SeededAt != nil && !frozenAt.Before(*d.SeededAt) {
			d.found("D3", "the list was frozen at %s, after the secrets were revealed", frozenAt.Format(rfc))
		}
	case d.SeededAt != nil && at.Sub(*d.SeededAt) > clocks.ApartMax:
		d.found("D3", "the seed was given at %s, before anybody can know its round: the clock was behind, and the list may "+
			"have been frozen when the seed was public", d.SeededAt.UTC().Format(rfc))
	case !frozenAt.Before(at):
		d.found("D3", "the list was frozen at %s, and round %d of its seed is of %s", frozenAt.Format(rfc), d.Round,
			at.Format(rfc))
	case len(rounds) == 0 || rounds[len(rounds)-1] != d.Round:
		d.found("D3", "the seed is of round %d, and the rule gives the last of the rounds %v", d.Round, rounds)
	}
}

// publishedGoods are the units as they must be in the event DrawFrozen: the stock by the log, and what was sold before.
func (d *drawCheck) publishedGoods() *draw.Goods {
	published := d.Published.Goods
	if d.Version == draw.FirstVersion || published == nil || d.Logged == nil {
		return d.Logged
	}
	// Orders that were live then may have ended, so fewer of them are known than there are.
	if published.Sold > d.Logged.Sold {
		d.found("D3", "the event DrawFrozen has %d units that were sold before, and orders have %d", published.Sold,
			d.Logged.Sold)
	}
	for _, place := range published.Holders {
		if !slices.Contains(d.Logged.Holders, place) {
			d.found("D3", "the event DrawFrozen has an order of the entrant at place %d, and there is none", place)
		}
	}
	goods := *published
	goods.Stock, goods.Items = d.Logged.Stock, slices.Clone(d.Logged.Items)
	for i := range min(len(goods.Items), len(published.Items)) {
		goods.Items[i].Sold = published.Items[i].Sold
	}
	return &goods
}

// drawPortion is how many chunks of a list are compared at a time.
const drawPortion = 64

// checkList compares the list with its root, and with the orders.
func (d *drawCheck) checkList(ctx context.Context) error {
	var roots draw.Tree
	var last uuid.UUID
	count := int64(0)
	for next, more := int64(0), true; more; {
		var ids, records []byte
		rows, _ := d.tx.Query(ctx, sql.AuditDrawChunks, d.SaleID, next-1, drawPortion) // rows carry the error
		var c struct {
			number             int64
			first              uuid.UUID
			records, ids, hash []byte
		}
		before, short := next, false
		_, err := pgx.ForEachRow(rows, []any{&c.number, &c.first, &c.records, &c.ids, &c.hash}, func() error {
			var tree draw.Tree
			n := min(len(c.records)/draw.RecordBytes, len(c.ids)/len(last)) // the same, but for a damage
			c.records, c.ids = c.records[:n*draw.RecordBytes], c.ids[:n*len(last)]
			for record := range slices.Chunk(c.records, draw.RecordBytes) {
				tree.Add(draw.Record(record).Leaf())
			}
			root := tree.Root()
			switch {
			case c.number != next || short:
				d.found("D1", "chunk %d of the list follows %d entries", c.number, count+int64(len(ids)/len(last)))
			case !bytes.Equal(root[:], c.hash):
				d.found("D1", "chunk %d of the list, from place %d on, has not the root of its records", c.number,
					c.number*draw.ChunkLeaves)
			case !bytes.HasPrefix(c.ids, c.first[:]):
				d.found("D1", "chunk %d of the list, from place %d on, does not begin with the entry %s", c.number,
					c.number*draw.ChunkLeaves, c.first)
			}
			short = n < draw.ChunkLeaves
			roots.Add(root)
			ids, records, next = append(ids, c.ids...), append(records, c.records...), c.number+1
			return nil
		})
		if err != nil {
			return err
		}
		to := uuid.Max
		if more = next-before >= drawPortion && !short; more {
			to = uuid.UUID(ids[len(ids)-len(to):])
		}
		if !d.Archived {
			if err := d.compareEntries(ctx, count, ids, records, last, to); err != nil {
				return err
			}
		}
		last = to
		count += int64(len(ids) / len(last))
	}
	root := roots.Root()
	if d.isWhole = count == d.Entries && bytes.Equal(root[:], d.Root); !d.isWhole {
		d.found("D1", "the list has %d entries with the root %x, and the draw has %d with %x", count, root[:], d.Entries,
			d.Root)
	}
	return nil
}

// compareEntries compares the part of the list from a place on with the orders whose ids are above one, up to another.
func (d *drawCheck) compareEntries(ctx context.Context, from int64, ids, records []byte, after, to uuid.UUID) error {
	place := func(n int) int64 { return from + int64(n) }
	id := func(n int) uuid.UUID { return uuid.UUID(ids[n*len(after):]) }
	n, length := 0, len(ids)/len(after)
	skip := func() {
		d.found("D1", "place %d of the list has the order %s, which was no live entry when the entries closed", place(n),
			id(n))
		n++
	}
	rows, _ := d.tx.Query(ctx, sql.AuditDrawEntries, d.EntriesID, after, to, d.ClosesAt) // its error comes with the rows
	entry := order.Receipt{SaleID: d.EntriesID}
	_, err := pgx.ForEachRow(rows, []any{
		&entry.OrderID, &entry.User, &entry.Quantity, &entry.Lines, &entry.Sequence, &entry.Epoch, &entry.ReservedAt,
	}, func() error {
		for n < length && bytes.Compare(ids[n*len(after):][:len(after)], entry.OrderID[:]) < 0 {
			skip()
		}
		if n == length || id(n) != entry.OrderID {
			own := entry.OrderID
			d.note("D1", Finding{Sale: &d.SaleID, Order: &own, User: entry.User, Remedy: remedyDraw, What: fmt.Sprintf(
				"the entry is not in the list, where it belongs before place %d", place(n))})
			return nil
		}
		record, err := draw.NewRecord(entry)
		if err != nil || !bytes.HasPrefix(records[n*draw.RecordBytes:], record[:]) {
			d.found("D1", "place %d of the list has not the record of its order %s", place(n), entry.OrderID)
		}
		n++
		return nil
	})
	for err == nil && n < length {
		skip()
	}
	return err
}

// seed returns what the seed must be.
func (d *drawCheck) seed() (draw.Seed, error) {
	if len(d.Parties) > 0 {
		return draw.PartiesSeed(d.Version, d.SaleID, d.Root, d.Parties)
	}
	return draw.BeaconSeed(d.Round, d.Signature)
}

// itemRanks are the ranks of an item that had their turn.
type itemRanks struct {
	letter string
	// first is where the places of the item begin in draw_ranks.
	first     int64
	next, end int64
	above     draw.Score
	lowest    *draw.Lowest
}

// ranksAtOnce bounds the ranks that are compared in one pass over the list, and so the memory.
const ranksAtOnce = 1 << 18

// errNotWhole is why ranks cannot be checked: the list is another one than when they were made.
var errNotWhole = errors.New("the list of a draw has not the root of the draw")

// checkRanks compares the ranks that had their turn with what list and seed give, and the turns with the ranks.
func (d *drawCheck) checkRanks(ctx context.Context) error {
	var row *draw.Seeded
	if d.SeededAt != nil {
		row = &draw.Seeded{Seed: d.Seed, Round: d.Round, Signature: d.Signature, Parties: d.Parties}
	}
	// Without the event DrawFrozen D3 is broken, whatever the other events are.
	if d.Published != nil && !reflect.DeepEqual(d.Revealed, row) {
		d.found("D4", "the seed, or what it is made of, is not that of the event DrawSeeded")
	}
	if row == nil {
		return nil
	}
	if seed, err := d.seed(); err != nil {
		d.found("D4", "the seed follows from nothing: %v", err)
		return nil
	} else if !bytes.Equal(seed[:], d.Seed) {
		d.found("D4", "the seed is %x, and must be %x", d.Seed, seed[:])
		return nil
	}
	switch {
	case d.RankedAt == nil:
		return nil
	case !d.isWhole:
		return errNotWhole
	}
	open, err := d.itemRanks(ctx)
	for err == nil && len(open) > 0 {
		open, err = d.compareRanks(ctx, open)
	}
	return err
}

func (d *drawCheck) itemRanks(ctx context.Context) (open []*itemRanks, err error) {
	turns, err := draws.NextRanks(ctx, d.tx, d.SaleID)
	if err != nil {
		return nil, err
	}
	first := int64(0)
	for i, entries := range d.ItemEntries {
		letter := ""
		if d.WithItems {
			letter = order.ItemLetter(i)
		}
		if end := min(turns[letter], entries); end > 0 {
			open = append(open, &itemRanks{letter: letter, first: first, end: end})
		}
		if turns[letter] > entries {
			d.found("D5", "rank %d%s had its turn, and the list has %d", turns[letter]-1, ofItem(letter), entries)
		}
		first += entries
	}
	return open, nil
}

func ofItem(letter string) string {
	if letter == "" {
		return ""
	}
	return " of the item " + letter
}

// compareRanks compares the next ranks of each item, and returns the items with more.
func (d *drawCheck) compareRanks(ctx context.Context, open []*itemRanks) (more []*itemRanks, err error) {
	byLetter := map[byte]*draw.Lowest{}
	for _, i := range open {
		i.lowest = draw.NewLowest(int(min(i.end-i.next, int64(max(1, ranksAtOnce/len(open))))), i.above)
		byLetter[cmp.Or(i.letter, "\x00")[0]] = i.lowest
	}
	place, seed := int64(0), draw.Seed(d.Seed)
	rows, _ := d.tx.Query(ctx, sql.DrawsChunks, d.SaleID, 0, nil) // its error comes with the rows
	var records pgtype.DriverBytes
	if _, err := pgx.ForEachRow(rows, []any{&records}, func() error {
		for raw := range slices.Chunk(records[:len(records)/draw.RecordBytes*draw.RecordBytes], draw.RecordBytes) {
			if lowest := byLetter[raw[0]]; lowest != nil {
				lowest.Add(place, seed.Score(draw.Record(raw).Leaf()))
			}
			place++
		}
		return nil
	}); err != nil {
		return nil, err
	}
	for _, i := range open {
		ranks := i.lowest.Ranks()
		if len(ranks) == 0 {
			d.found("D4", "rank %d%s had its turn, and the list has no entry for it", i.next, ofItem(i.letter))
			continue
		}
		ranked, err := d.compareRanked(ctx, i, ranks)
		if err == nil {
			err = d.compareTurns(ctx, i, ranked)
		}
		if err != nil {
			return nil, err
		}
		i.above = ranks[len(ranks)-1].Score
		if i.next += int64(len(ranks)); i.next < i.end {
			more = append(more, i)
		}
	}
	return more, nil
}

// compareRanked compares ranks with draw_ranks, and returns the places that are there, -1 for what is missing.
func (d *drawCheck) compareRanked(ctx context.Context, i *itemRanks, ranks []draw.Ranked) ([]int64, error) {
	ranked := slices.Repeat([]int64{-1}, len(ranks))
	from, to := i.first+i.next, i.first+i.next+int64(len(ranks))-1
	rows, _ := d.tx.Query(ctx, sql.AuditDrawRanks, d.SaleID, from/draw.ChunkLeaves, to/draw.ChunkLeaves) // as above
	var chunk int64
	var places pgtype.DriverBytes
	_, err := pgx.ForEachRow(rows, []any{&chunk, &places}, func() error {
		for n := 0; n+4 <= len(places); n += 4 {
			if at := chunk*draw.ChunkLeaves + int64(n/4); at >= from && at <= to {
				ranked[at-from] = int64(binary.BigEndian.Uint32(places[n:]))
			}
		}
		return nil
	})
	for n, r := range ranks {
		if err == nil && ranked[n] != r.Place {
			d.found("D4", "rank %d%s is that of place %d, by the list and the seed, and draw_ranks has place %d",
				i.next+int64(n), ofItem(i.letter), r.Place, ranked[n])
		}
	}
	return ranked, err
}

// compareTurns compares what became of ranks with their places.
func (d *drawCheck) compareTurns(ctx context.Context, i *itemRanks, ranked []int64) error {
	expected, end := i.next, i.next+int64(len(ranked))
	gap := func(to int64) {
		if expected < to {
			d.found("D5", "ranks %d to %d%s had no turn, and later ranks had", expected, to-1, ofItem(i.letter))
		}
	}
	rows, _ := d.tx.Query(ctx, sql.DrawsOffers, d.SaleID, i.letter, i.next, len(ranked)) // its error comes with the rows
	var rank, place int64
	_, err := pgx.ForEachRow(rows, []any{&rank, &place, nil}, func() error {
		if rank >= end {
			return nil
		}
		gap(rank)
		if ranked[rank-i.next] != place {
			d.found("D5", "rank %d%s is that of place %d, and place %d had its turn", rank, ofItem(i.letter),
				ranked[rank-i.next], place)
		}
		expected = rank + 1
		return nil
	})
	if err == nil {
		gap(end)
	}
	return err
}

// figuresOfDraws returns the line with the figures of a promise of draws.
func (r Report) figuresOfDraws(promise string) string {
	var entries, frozen, ranked, offered, skipped, stock, live int64
	for _, d := range r.Draws {
		entries, offered, skipped = entries+d.Entries, offered+d.Offered, skipped+d.Skipped
		if d.Frozen {
			frozen++
		}
		if d.Ranked {
			ranked++
		}
		for _, s := range r.Sales {
			if s.SaleID == d.SaleID {
				stock, live = stock+s.Stock, live+s.LiveUnits
			}
		}
	}
	n := format.Count[int64]
	switch promise {
	case "D1", "D2":
		return fmt.Sprintf("%s entries in %s", n(entries), plural(frozen, "frozen list"))
	case "D3", "D4":
		return fmt.Sprintf("%s, %s frozen, %s ranked", plural(int64(len(r.Draws)), "list"), n(frozen), n(ranked))
	case "D5":
		return fmt.Sprintf("%s offered, %s skipped", plural(offered, "rank"), n(skipped))
	}
	return fmt.Sprintf("%s units sold or to be paid, of %s", n(live), n(stock))
}
