package draw

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Bundle is all that is public about a draw, but the list of its entries.
type Bundle struct {
	// Version is that of the draw.
	Version       int       `json:"version"`
	SaleID        uuid.UUID `json:"sale_id"`
	EntriesSaleID uuid.UUID `json:"entries_sale_id"`
	Entries       int64     `json:"entries"`
	Root          Hex       `json:"root"`
	// ClosesAt, FreezeSeconds and FrozenAt give the rounds: see Rounds.
	ClosesAt      time.Time `json:"closes_at"`
	FreezeSeconds int64     `json:"freeze_seconds"`
	FrozenAt      time.Time `json:"frozen_at"`
	// Seed is missing until it is known.
	Seed   *Source `json:"seed,omitempty"`
	Rounds []int64 `json:"rounds,omitempty"`
	Stock  int64   `json:"stock"`
	// Items are the items of both sales in their order; none in sales without items.
	Items  []Item  `json:"items,omitempty"`
	Offers []Offer `json:"offers"`
	// VoidReason is why nothing is offered, in a draw that is void.
	VoidReason string `json:"void_reason,omitempty"`

	// Revision is that of the sale, up to which the bundle has all changes of the stock. Version 1 has nothing of what
	// follows.
	Revision int64     `json:"revision,omitzero"`
	Goods    *Goods    `json:"goods,omitempty"`
	Restocks []Restock `json:"restocks,omitempty"`
	// Parties are those that are to give the seed while there is none.
	Parties  []Party   `json:"parties,omitempty"`
	VoidedAt time.Time `json:"voided_at,omitzero"`
}

// Source is where a seed comes from: a round of drand, or parties.
type Source struct {
	Kind      SeedKind `json:"kind"`
	Round     int64    `json:"round,omitzero"`
	Signature Hex      `json:"signature,omitempty"`
	Parties   []Party  `json:"parties,omitempty"`
}

// SeedKind is a kind of seed.
type SeedKind string

// The kinds of seeds.
const (
	SeedDrand   SeedKind = "drand"
	SeedParties SeedKind = "parties"
)

// Item is an item of the sale that is drawn.
type Item struct {
	Code  string `json:"code"`
	Stock int64  `json:"stock"`
	// Sold is that of Goods, for this item.
	Sold int64 `json:"sold,omitzero"`
}

// Offer is what became of a rank: the entry at the place was offered a unit, or was skipped for a reason. Ranks count
// from 0, those of each item on their own.
type Offer struct {
	Rank    int64   `json:"rank"`
	Place   int64   `json:"place"`
	Item    string  `json:"item,omitempty"`
	Outcome Outcome `json:"outcome"`
	Reason  Reason  `json:"reason,omitempty"`
}

// Outcome is what became of a rank.
type Outcome string

// The outcomes of a rank.
const (
	Offered Outcome = "offered"
	Skipped Outcome = "skipped"
)

// Reason is why a rank was skipped.
type Reason string

// The reasons to skip a rank.
const (
	// SkippedHolder: the entrant already has an order in the sale.
	SkippedHolder Reason = order.RejectedAlreadyPurchased
	// SkippedCancelled: the entry was cancelled after the list was frozen.
	SkippedCancelled Reason = "entry-cancelled"
)

// Hex is bytes that are hexadecimal in JSON.
type Hex []byte

// MarshalText implements encoding.TextMarshaler.
func (h Hex) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hex) UnmarshalText(text []byte) (err error) {
	*h, err = hex.AppendDecode(nil, text)
	return err
}

// The limits of a bundle, with which it can be read in bounded memory.
const (
	bundleBytesMax = 64 << 20
	offersMax      = 1_000_000
	restocksMax    = 100_000
)

// ErrBundle is returned for a text that is no bundle, or too large.
var ErrBundle = errors.New("not a bundle that can be verified")

// ReadBundle reads a bundle. Its error is that of the reader, or ErrBundle.
func ReadBundle(r io.Reader) (*Bundle, error) {
	limited := &limitedReader{from: r, left: bundleBytesMax}
	var b Bundle
	err := json.UnmarshalRead(limited, &b, json.RejectUnknownMembers(true), json.WithUnmarshalers(json.JoinUnmarshalers(
		atMost[int64](roundsMax), atMost[Party](partiesMax), atMost[Item](order.MaxItems), atMost[Offer](offersMax),
		atMost[Place](offersMax), atMost[Restock](restocksMax))))
	switch {
	case limited.err != nil:
		return nil, limited.err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrBundle, err)
	case b.Version < FirstVersion || b.Version > Version:
		return nil, fmt.Errorf("%w: its version is %d, want %d to %d", ErrBundle, b.Version, FirstVersion, Version)
	case b.Entries < 0 || b.Entries > MaxEntries:
		return nil, fmt.Errorf("%w: it has %d entries, want 0 to %d", ErrBundle, b.Entries, int64(MaxEntries))
	case b.Version > FirstVersion && b.Goods == nil:
		return nil, fmt.Errorf("%w: it has no goods", ErrBundle)
	}
	for i, item := range b.Items {
		same := func(other Item) bool { return other.Code == item.Code }
		if !order.IsItemCode(item.Code) || slices.ContainsFunc(b.Items[:i], same) {
			return nil, fmt.Errorf("%w: item %q", ErrBundle, item.Code)
		}
	}
	return &b, nil
}

// atMost reads lists, and refuses those with more members.
func atMost[T any](most int) *json.Unmarshalers {
	return json.UnmarshalFromFunc(func(d *jsontext.Decoder, list *[]T) error {
		if d.PeekKind() != '[' {
			return errors.New("want a list")
		}
		if _, err := d.ReadToken(); err != nil {
			return err
		}
		*list = []T{}
		for d.PeekKind() != ']' {
			if len(*list) == most {
				return fmt.Errorf("a list has more than %d members", most)
			}
			var member T
			if err := json.UnmarshalDecode(d, &member); err != nil {
				return err
			}
			*list = append(*list, member)
		}
		_, err := d.ReadToken()
		return err
	})
}

// limitedReader fails after so many bytes. Err is the error of what it reads from.
type limitedReader struct {
	from io.Reader
	left int
	err  error
}

func (r *limitedReader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, fmt.Errorf("it is longer than %d bytes", bundleBytesMax)
	}
	n, err := r.from.Read(p[:min(len(p), r.left)])
	r.left -= n
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}
