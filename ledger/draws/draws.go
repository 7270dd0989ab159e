// Package draws holds draws in Postgres: the frozen list of the entries, its seed, the ranks, and what became of each
// rank. The tables are in sql/migrations/00002_draws.sql; what follows from them alone is package draw.
//
// A draw goes through its states in one direction: the list is frozen when the entries are over (freeze.go), anyone
// gives the seed (seed.go), all entries are ranked, and units are offered by rank (offer.go). Each step is
// one transaction, or goes on after a crash where it was. What people ask of a draw is in read.go.
package draws

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/draw"
	"stampede/internal/clocks"
	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

var (
	// ErrNoDraw is returned for a sale whose units are not offered by rank.
	ErrNoDraw = errors.New("the sale is not drawn")
	// ErrNotFrozen is returned for what needs the frozen list, before there is one.
	ErrNotFrozen = errors.New("the list of the entries is not frozen yet")
	// ErrVoid is returned for the seed of a draw that is void.
	ErrVoid = errors.New("the draw is void")
	// ErrLate is returned for a secret after the time for them. A worker makes the draw void.
	ErrLate = errors.New("the time for secrets is over, and one is missing")
	// ErrOtherSeed is returned for a round of a draw whose seed is that of its parties, and for a secret of one whose
	// seed is that of a round.
	ErrOtherSeed = errors.New("the seed of the draw comes from elsewhere")
	// ErrNoParty is returned for the secret of a party that the draw does not have.
	ErrNoParty = errors.New("the draw has no such party")
	// ErrNoEntry is returned for a receipt whose order is not in the list.
	ErrNoEntry = errors.New("the order is not in the list of the entries")
)

// WrongRoundError is returned for a round that does not give the seed of the draw.
type WrongRoundError struct {
	// Round is the one that does.
	Round int64
}

func (e *WrongRoundError) Error() string {
	return fmt.Sprintf("the seed of the draw is that of round %d, of %s", e.Round,
		draw.RoundTime(e.Round).Format(time.RFC3339))
}

// Kind says by what the entries are ranked.
type Kind string

// The kinds.
const (
	// ByHash: by the hash of seed and entry: a draw.
	ByHash Kind = "draw"
	// ByPlace: by the place in the entries sale: a waiting list. It has no list, no seed and no ranks.
	ByPlace Kind = "waitlist"
)

// State is how far a draw is.
type State string

// The states, in their order.
const (
	Entering State = "entering" // the entries are not over
	Freezing State = "freezing" // they are, and the list is not frozen
	Frozen   State = "frozen"   // the seed is not known
	Ranking  State = "ranking"  // it is, and the entries are not ranked
	Offering State = "offering"
	// Over: the sale that is drawn has ended, or each rank had its turn. Offers that are lost with Redis later reopen it.
	Over State = "over"
	// Open: each rank had its turn, and what was left is sold to everybody.
	Open State = "open"
	Void State = "void"
)

// Draw is a draw as it is in Postgres. What is not known yet is zero.
type Draw struct {
	SaleID, EntriesID uuid.UUID
	Kind              Kind
	State             State
	CreatedAt         time.Time
	// ClosesAt is the end of the entries.
	ClosesAt time.Time
	// Freeze is the time from there to the first round.
	Freeze time.Duration
	// Version is that of package draw.
	Version int
	// Parties are those that make the seed, with the secrets that they revealed; none for drand.
	Parties []draw.Party
	// RevealBy is when a missing secret makes the draw void.
	RevealBy time.Time
	// Rounds are those up to the one that gives the seed: as the rule has it now, until the list is frozen. There are
	// none with parties, nor if the last one is over.
	Rounds []int64

	// Stock and Items are those of the sale that is drawn, Partitions and Shards its layout, and Paused is true while an
	// operator has halted it.
	Stock              int64
	Items              []draw.Item
	Partitions, Shards int
	Paused             bool
	// GoodsOver is true after its end. Ended is true after an operator has ended it, and EntriesEnded if nobody can
	// enter any more: a waiting list is closed.
	GoodsOver, Ended, EntriesEnded bool

	// Entries is the length of the frozen list, and Root its root. They are public before FrozenAt is read.
	Entries  int64
	Root     draw.Hex
	FrozenAt time.Time
	// Goods are the units as they were then; nil in version 1.
	Goods *draw.Goods

	// Signature is that of the round of the seed; empty with parties.
	Signature draw.Hex
	Seed      draw.Hex
	SeededAt  time.Time
	// ItemEntries is how many ranks each item has; one number in a sale without items.
	ItemEntries []int64
	RankedAt    time.Time

	VoidedAt   time.Time
	VoidReason string

	// isEarly is true if the round of the seed is still to come by the clock of Postgres.
	isEarly bool
	// isLate is true if it cannot get a seed any more by the clock of Postgres, which nothing final follows from alone.
	isLate bool

	// Opening is true if what is left is sold to everybody when each rank had its turn, and all that was offered is in
	// Postgres.
	Opening bool

	// Offered and Skipped count the ranks that had their turn. Those of each item are its first ones.
	Offered, Skipped int64

	// due is the turn of offers_due with which it was found there (due.go).
	due int64

	// epoch is that of the sale that is drawn. Offers that were lost before offersEpoch have been made again (lost).
	epoch, offersEpoch int64
}

// Round is the one that gives the seed; 0 with parties.
func (d *Draw) Round() int64 {
	if len(d.Rounds) == 0 {
		return 0
	}
	return d.Rounds[len(d.Rounds)-1]
}

// Missing are the parties whose secrets are missing.
func (d *Draw) Missing() (names []string) {
	for _, party := range d.Parties {
		if len(party.Secret) == 0 {
			names = append(names, party.Name)
		}
	}
	return names
}

// drawRow is a row of find.sql.
type drawRow struct {
	SaleID, EntriesID     uuid.UUID
	Kind                  Kind
	CreatedAt             time.Time
	FreezeSeconds         int64
	Parties               []draw.Party
	Version               int
	Entries               int64
	Root, Signature, Seed []byte
	FrozenAt, SeededAt    zeronull.Timestamptz
	Published             bool
	Goods                 *draw.Goods
	RankedAt, VoidedAt    zeronull.Timestamptz
	Round                 int64
	ItemEntries           []int64
	VoidReason            string
	Offered, Skipped      int64
	Epoch, OffersEpoch    int64
	ClosesAt              zeronull.Timestamptz
	EntriesOver           bool
	EntriesEnded          bool
	Now                   time.Time
	Stock                 int64
	Items                 []draw.Item
	Partitions, Shards    int
	GoodsOver             bool
	GoodsPaused           bool
	GoodsEnded            bool
	Opened, Opening       bool
}

func (r *drawRow) draw() Draw {
	d := Draw{
		SaleID: r.SaleID, EntriesID: r.EntriesID, Kind: r.Kind, CreatedAt: r.CreatedAt.UTC(), ClosesAt: utc(r.ClosesAt),
		Freeze: time.Duration(r.FreezeSeconds) * time.Second, Parties: r.Parties, Version: r.Version, Stock: r.Stock,
		Items: r.Items, Partitions: r.Partitions, Shards: r.Shards, Paused: r.GoodsPaused, GoodsOver: r.GoodsOver,
		Ended: r.GoodsEnded, EntriesEnded: r.EntriesEnded,
		Entries: r.Entries, Root: r.Root, FrozenAt: utc(r.FrozenAt), Goods: r.Goods,
		Signature: r.Signature, Seed: r.Seed, SeededAt: utc(r.SeededAt), ItemEntries: r.ItemEntries,
		RankedAt: utc(r.RankedAt), VoidedAt: utc(r.VoidedAt), VoidReason: r.VoidReason, Offered: r.Offered,
		Skipped: r.Skipped, Opening: r.Opening, epoch: r.Epoch, offersEpoch: r.OffersEpoch,
	}
	if !r.Published {
		d.FrozenAt = time.Time{} // the root is committed, and its time is not proved (freeze.go)
	}
	if d.Kind == ByPlace {
		if d.State = Offering; r.GoodsOver {
			d.State = Over
		}
		return d
	}
	frozen := d.FrozenAt
	if frozen.IsZero() {
		frozen = r.Now
	}
	if len(d.Parties) == 0 {
		d.Rounds = draw.Rounds(d.ClosesAt, d.Freeze, frozen)
	} else if !d.FrozenAt.IsZero() {
		d.RevealBy = draw.RevealBy(d.FrozenAt, d.Freeze)
	}
	switch {
	case !d.VoidedAt.IsZero():
		d.State = Void
	case r.Opened && !r.GoodsOver:
		d.State = Open
	case r.GoodsOver, !d.RankedAt.IsZero() && d.Offered+d.Skipped == d.Entries && d.offersEpoch == d.epoch:
		d.State = Over
	case !r.EntriesOver:
		d.State = Entering
	case d.FrozenAt.IsZero():
		d.State = Freezing
	case d.SeededAt.IsZero():
		d.State = Frozen
	case d.RankedAt.IsZero():
		d.State = Ranking
	default:
		d.State = Offering
	}
	d.isLate = d.late(r.Now) != ""
	d.isEarly = d.State == Frozen && draw.RoundTime(d.Round()).Sub(r.Now) > clocks.ApartMax
	return d
}

func utc(t zeronull.Timestamptz) time.Time {
	if time.Time(t).IsZero() {
		return time.Time{}
	}
	return time.Time(t).UTC()
}

// Store has the draws. It is safe for concurrent use. Errors that are not named are those of Postgres.
type Store struct {
	pool   *pgxpool.Pool
	hashes hashCache
}

// New returns the draws of a migrated database.
func New(pool *pgxpool.Pool) *Store { return &Store{pool: pool} }

// Find returns the draw of a sale, or ErrNoDraw.
func (s *Store) Find(ctx context.Context, goods uuid.UUID) (Draw, error) {
	return find(ctx, s.pool, goods)
}

func find(ctx context.Context, on pg.Querier, goods uuid.UUID) (Draw, error) {
	rows, _ := on.Query(ctx, sql.DrawsFind, []uuid.UUID{goods}) // its error comes with the rows
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[drawRow])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNoDraw
	}
	if err != nil {
		return Draw{}, fmt.Errorf("find the draw of sale=%s: %w", goods, err)
	}
	return r.draw(), nil
}

// FindAll returns the draws and waiting lists of those of the sales that have one.
func (s *Store) FindAll(ctx context.Context, goods []uuid.UUID) ([]Draw, error) {
	rows, _ := s.pool.Query(ctx, sql.DrawsFind, goods) // its error comes with the rows
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Draw, error) {
		r, err := pgx.RowToStructByName[drawRow](row)
		return r.draw(), err
	})
	if err != nil {
		return nil, fmt.Errorf("find draws: %w", err)
	}
	return found, nil
}

// change has next look at the draw in a transaction that excludes other changes of it, and change it.
func change(
	ctx context.Context, on pg.Transactor, goods uuid.UUID, next func(pgx.Tx, *Draw) error,
) (d Draw, err error) {
	err = pg.InTransaction(ctx, on, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, sql.DrawsLock, goods).Scan(nil); errors.Is(err, pgx.ErrNoRows) {
			return ErrNoDraw
		} else if err != nil {
			return err
		}
		if d, err = find(ctx, tx, goods); err != nil {
			return err
		}
		if err := next(tx, &d); err != nil {
			return err
		}
		d, err = find(ctx, tx, goods)
		return err
	})
	return d, err
}

// The events of a draw, in the log of the sale that is drawn.
const (
	eventFrozen = "DrawFrozen"
	eventSeeded = "DrawSeeded"
	eventVoided = "DrawVoided"
)

// void makes a draw void.
func void(ctx context.Context, tx pgx.Tx, d *Draw, reason string) error {
	if _, err := tx.Exec(ctx, sql.DrawsVoid, d.SaleID, reason); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, sql.DrawsAddEvent, d.SaleID, eventVoided, map[string]any{"reason": reason})
	return err
}

// Clocks returns the time by the clocks of Postgres and Redis (reservation.Store.Times). What nothing undoes is done
// when both say so: the entries are frozen and a draw is void once and for all.
type Clocks func(context.Context, pg.Querier) (clocks.Times, error)

// EndLate makes a draw void that cannot get a seed any more: its list is not frozen before the last round, or a party
// has not revealed its secret in time. It returns whether it did.
func (s *Store) EndLate(ctx context.Context, d *Draw, read Clocks) (ended bool, err error) {
	if !d.isLate {
		return false, nil
	}
	_, err = change(ctx, s.pool, d.SaleID, func(tx pgx.Tx, d *Draw) error {
		times, err := read(ctx, tx)
		if err != nil {
			return err
		}
		reason := d.late(times.Earliest)
		if ended = reason != ""; !ended {
			return nil
		}
		return void(ctx, tx, d, reason)
	})
	return ended, wrap("end", d.SaleID, err)
}

// PublishesGoods is true if what is drawn is published with the list.
func (d *Draw) PublishesGoods() bool { return d.Version > draw.FirstVersion }

// late returns why the draw cannot get a seed any more at that time, or "".
func (d *Draw) late(now time.Time) string {
	switch {
	case d.State == Freezing && len(d.Parties) == 0 && draw.Rounds(d.ClosesAt, d.Freeze, now) == nil:
		return draw.VoidLate
	case d.State == Frozen && !d.RevealBy.IsZero() && now.After(d.RevealBy):
		return draw.VoidSilent
	}
	return ""
}

// View is the draw as everybody sees it.
func (d *Draw) View() draw.View {
	v := draw.View{
		Version: d.Version,
		SaleID:  d.SaleID, EntriesSaleID: d.EntriesID, State: string(d.State), CreatedAt: order.TimeText(d.CreatedAt),
		ClosesAt: order.TimeText(d.ClosesAt), FreezeSeconds: int64(d.Freeze / time.Second), Rounds: d.Rounds,
		Round: d.Round(), Parties: d.Parties, RevealBy: order.TimeText(d.RevealBy), Root: d.Root,
		FrozenAt: order.TimeText(d.FrozenAt), Goods: d.Goods,
		Signature: d.Signature, Seed: d.Seed, SeededAt: order.TimeText(d.SeededAt), RankedAt: order.TimeText(d.RankedAt),
		Offered: d.Offered, Skipped: d.Skipped, Opening: d.Opening && d.State != Void,
		VoidReason: d.VoidReason, VoidedAt: order.TimeText(d.VoidedAt),
	}
	if v.Round != 0 {
		v.RoundAt = order.TimeText(draw.RoundTime(v.Round))
	}
	if len(d.Root) > 0 {
		v.Entries = &d.Entries
	}
	if last := d.Offered + d.Skipped - 1; last >= 0 && len(d.Items) == 0 {
		v.LastRank = &last
	}
	return v
}

// lost returns turns of the item of t whose offers were recorded, and whose orders were lost with Redis before Postgres
// had them: at most so many, by rank. A rebuild of the stock in Redis records all that it finds, so an order of an
// earlier epoch that is not in Postgres is void for ever. An order that is cancelled or has expired is not lost.
func (d *Draw) lost(ctx context.Context, tx pgx.Tx, t Turn, most int64) (turns []Turn, err error) {
	if d.offersEpoch == d.epoch || most <= 0 {
		return nil, nil
	}
	rows, _ := tx.Query(ctx, sql.DrawsLost, d.SaleID, d.EntriesID, t.Item, d.epoch, most) // rows carry the error
	_, err = pgx.ForEachRow(rows, []any{&t.Rank, &t.Place, &t.EntryID, &t.UserID, &t.Cancelled}, func() error {
		t.OrderID = d.orderID(t.EntryID)
		turns = append(turns, t)
		return nil
	})
	return turns, err
}
