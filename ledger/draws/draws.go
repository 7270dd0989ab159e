// Package draws holds draws in Postgres: the frozen list of the entries, its seed, the ranks, and what became of each
// rank. The tables are in sql/migrations/00002_draws.sql; what follows from them alone is package draw.
//
// A draw goes through its states in one direction: the list is frozen when the entries are over (freeze.go), anyone
// gives the seed (seed.go), all entries are ranked (rank.go), and units are offered by rank (offer.go). Each step is
// one transaction, or begins anew after a crash.
package draws

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/reservation/order"
)

var (
	// ErrNoDraw is returned for a sale whose units are not offered by rank.
	ErrNoDraw = errors.New("the sale is not drawn")
	// ErrNotFrozen is returned for what needs the frozen list, before there is one.
	ErrNotFrozen = errors.New("the list of the entries is not frozen yet")
	// ErrVoid is returned for the seed of a draw that is void.
	ErrVoid = errors.New("the draw is void")
	// ErrOtherSeed is returned for a round of a draw whose seed is that of its parties, and for a secret of one whose seed
	// is that of a round.
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
	Over     State = "over" // the sale that is drawn has ended, or each rank had its turn
	Void     State = "void"
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
	// Parties are those that make the seed, with the secrets that they revealed; none for drand.
	Parties []draw.Party
	// RevealBy is when a missing secret makes the draw void.
	RevealBy time.Time
	// Rounds are those up to the one that gives the seed: as the rule has it now, until the list is frozen.
	Rounds []int64

	// Stock and Items are those of the sale that is drawn.
	Stock int64
	Items []draw.Item

	Entries  int64
	Root     draw.Hex
	FrozenAt time.Time

	Signature draw.Hex
	Seed      draw.Hex
	SeededAt  time.Time
	RankedAt  time.Time

	VoidedAt   time.Time
	VoidReason string

	// Offered and Skipped count the ranks that had their turn. Those of each item are its first ones.
	Offered, Skipped int64
}

// Store has the draws. It is safe for concurrent use. Errors that are not named are those of Postgres.
type Store struct{ pool *pgxpool.Pool }

// New returns the draws of a migrated database.
func New(pool *pgxpool.Pool) *Store { return &Store{pool} }

// Find returns the draw of a sale, or ErrNoDraw.
func (s *Store) Find(ctx context.Context, goods uuid.UUID) (Draw, error) {
	return Draw{}, errors.ErrUnsupported
}

// List returns at most limit draws, the newest first, older than the one of the sale before unless that is uuid.Nil.
func (s *Store) List(ctx context.Context, before uuid.UUID, limit int) ([]Draw, error) {
	return nil, errors.ErrUnsupported
}

// Beacon gives the draw its seed: the signature of its round of drand quicknet. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrOtherSeed, a *WrongRoundError, or draw.ErrBeacon.
func (s *Store) Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (Draw, error) {
	return Draw{}, errors.ErrUnsupported
}

// Reveal gives the draw the secret of a party; the last one makes the seed. A repeat changes nothing. The error is
// ErrNoDraw, ErrNotFrozen, ErrVoid, ErrOtherSeed, ErrNoParty, or draw.ErrParties for a secret of another commitment.
func (s *Store) Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (Draw, error) {
	return Draw{}, errors.ErrUnsupported
}

// Proof tells an entrant their part in a draw.
type Proof struct {
	Place int64
	Leaf  draw.Hash
	// Path proves that the leaf is at the place in the list with the root of the draw: tlog.CheckRecord.
	Path    tlog.RecordProof
	Entries int64
	Root    draw.Hash
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

// Proof returns the proof for a receipt whose signature the caller has verified. The error is ErrNoDraw, ErrNotFrozen, or
// ErrNoEntry.
func (s *Store) Proof(ctx context.Context, goods uuid.UUID, r order.Receipt) (Proof, error) {
	return Proof{}, errors.ErrUnsupported
}

// Leaves writes the list: the records of all entries by place, Draw.Entries times draw.RecordBytes. It keeps no
// transaction open while it writes. The error is ErrNoDraw, ErrNotFrozen, or that of w.
func (s *Store) Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	return errors.ErrUnsupported
}

// Bundle returns all that is public about a draw but its list. The error is ErrNoDraw or ErrNotFrozen.
func (s *Store) Bundle(ctx context.Context, goods uuid.UUID) (*draw.Bundle, error) {
	return nil, errors.ErrUnsupported
}

// Freeze freezes the list of the entries, all of which must be final: over, in Postgres, and unable to become others. It
// ends the entries sale, so that none is added later, or makes the draw void if the last round is over.
func (s *Store) Freeze(ctx context.Context, goods uuid.UUID) error {
	return errors.ErrUnsupported
}

// Rank ranks all entries by the seed. It needs 12 bytes of memory for each.
func (s *Store) Rank(ctx context.Context, goods uuid.UUID) error {
	return errors.ErrUnsupported
}

// Turn is the next rank of an item, with the entry that has it.
type Turn struct {
	// Item is the letter of the item, and Code its code; both are empty in a sale without items.
	Item, Code string
	Rank       int64
	Place      int64
	EntryID    uuid.UUID
	UserID     string
	// OrderID is the id of the order that an offer makes: it follows from the draw, the item and the rank, so that a
	// repeat is recognized.
	OrderID uuid.UUID
}

// Reserver reserves units for these entrants in the sale that is drawn. It returns, for each turn, why its rank is
// skipped, or "" if the unit is reserved, be it by a repeat; the turns without an answer are those from the first one of
// each item that found no unit.
type Reserver func(ctx context.Context, turns []Turn) (answers map[uuid.UUID]draw.Reason, err error)

// Offer has the next ranks have their turn, at most limit of each item, and records what became of them. It returns how
// many. One process at a time does so for a draw; the others return 0. After a crash between reserve and the record the
// same turns come again, with the same orders. Entries that were cancelled are skipped before.
func (s *Store) Offer(ctx context.Context, goods uuid.UUID, limit map[string]int64, reserve Reserver) (int, error) {
	return 0, errors.ErrUnsupported
}
