package draw

import (
	"bytes"
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

// Witness is what somebody kept of a draw: what was public before its seed, and what the relay told later.
type Witness struct {
	Frozen []*Frozen
	later  []told
}

// told is the data of an event of the relay, of any sale.
type told struct {
	Type     string    `json:"-"`
	SaleID   uuid.UUID `json:"sale_id"`
	Revision int64     `json:"revision"`
	Stock    int64     `json:"stock"`
	Items    []Item    `json:"items"`
	Reason   string    `json:"reason"`
}

// The types of the events that a verification reads.
const (
	frozenEvent    = "stampede.draw.frozen"
	seededEvent    = "stampede.draw.seeded"
	voidedEvent    = "stampede.draw.voided"
	restockedEvent = "stampede.sale.restocked"
)

// ErrFrozen is returned for a text that does not have what is public of a draw before its seed exists.
var ErrFrozen = errors.New("not what was published of a frozen draw")

// ParseWitness reads what somebody kept, one after the other: events of the relay, of which others are left out, or in
// place of stampede.draw.frozen its data or a View without a seed. One of these is there. The error is ErrFrozen.
func ParseWitness(text []byte) (*Witness, error) {
	w := &Witness{}
	values := jsontext.NewDecoder(bytes.NewReader(text))
	for {
		value, err := values.ReadValue()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = w.add(value)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFrozen, err)
		}
	}
	if len(w.Frozen) == 0 {
		return nil, fmt.Errorf("%w: it has no root", ErrFrozen)
	}
	return w, nil
}

func (w *Witness) add(value jsontext.Value) error {
	var event struct {
		Type string         `json:"type"`
		Data jsontext.Value `json:"data"`
	}
	if err := json.Unmarshal(value, &event); err != nil {
		return err
	}
	if event.Data != nil {
		value = event.Data
	}
	switch event.Type {
	case seededEvent, voidedEvent, restockedEvent:
		t := told{Type: event.Type}
		if err := json.Unmarshal(value, &t); err != nil {
			return err
		}
		w.later = append(w.later, t)
		return nil
	case frozenEvent, "":
	default:
		return nil
	}
	var frozen struct {
		Frozen
		Seed Hex `json:"seed"`
	}
	if err := json.Unmarshal(value, &frozen); err != nil {
		return err
	}
	switch f := &frozen.Frozen; {
	case len(f.Root) == 0:
		return errors.New("it has no root")
	case f.FrozenAt.IsZero():
		return errors.New("it has no time yet: keep it once it has frozen_at")
	case len(frozen.Seed) > 0:
		return errors.New("it has the seed, so it was made later")
	case f.Version > FirstVersion && f.Goods == nil:
		return errors.New("it has no goods")
	}
	w.Frozen = append(w.Frozen, &frozen.Frozen)
	return nil
}

// missing returns what the event says and the bundle does not, "" if there is nothing.
func (t *told) missing(b *Bundle) string {
	switch {
	case t.SaleID != b.SaleID:
	case t.Type == seededEvent && b.Seed == nil:
		return "a seed"
	case t.Type == voidedEvent && t.Reason != b.VoidReason:
		return fmt.Sprintf("that the draw is void (%s)", t.Reason)
	case t.Type == restockedEvent && b.Goods != nil && t.Revision > b.Goods.Revision:
		known := slices.IndexFunc(b.Restocks, func(r Restock) bool { return r.Revision == t.Revision })
		if stock := stockText(t.Stock, t.Items); known < 0 || b.Restocks[known].stock() != stock {
			return "a change of the stock to " + stock
		}
	}
	return ""
}

// Compare compares the bundle with what somebody kept of the draw, nil if nobody has, and names what no file proves.
func (b *Bundle) Compare(kept *Witness) Report {
	return append(Report{b.compare(kept)}, b.onTrust(kept)...)
}

func (b *Bundle) compare(kept *Witness) Check {
	const name = "witness"
	if kept == nil {
		return checked(name, Unchecked, "root, times, parties and units may be newer than the seed: compare them with the "+
			"event "+frozenEvent)
	}
	own := Frozen{
		Version: b.Version, SaleID: b.SaleID, EntriesSaleID: b.EntriesSaleID, Entries: b.Entries, Root: b.Root,
		FrozenAt: b.FrozenAt, Rounds: b.Rounds, ClosesAt: b.ClosesAt, FreezeSeconds: b.FreezeSeconds, Goods: b.Goods,
		Parties: b.Parties,
	}
	if b.Seed != nil {
		own.Parties = b.Seed.Parties
	}
	for _, frozen := range kept.Frozen {
		if b.Seed == nil && b.Goods == nil {
			own.Parties = frozen.Parties // version 1 does not publish them here
		}
		if differs := frozen.Difference(&own); differs != "" {
			return checked(name, Broken, "before the seed existed, it was %s", differs)
		}
	}
	newer := ""
	for _, t := range kept.later {
		switch missing := t.missing(b); {
		case missing == "":
		case t.Revision > b.Revision:
			newer = fmt.Sprintf("it has %s at revision %d, which is after the bundle: get a newer one", missing, t.Revision)
		default:
			return checked(name, Broken, "it has %s at revision %d, and the bundle does not", missing, t.Revision)
		}
	}
	if newer != "" {
		return Check{name, Unknown, newer}
	}
	return checked(name, Kept, "root, times, parties and units are those that were published before the seed existed")
}

// onTrust names what cannot be proved.
func (b *Bundle) onTrust(kept *Witness) (on Report) {
	trust := func(name, format string, a ...any) { on = append(on, checked(name, Trusted, format, a...)) }
	trust("entries", "that none was kept out of the list, and that each is of another person: look for your own receipt")
	if kept != nil {
		trust("witness", "that its file is from before the seed, and from somebody who is not the shop")
	}
	switch {
	case b.VoidReason != "":
		trust("void", "the reason, and that it was so at the time")
	case b.Seed != nil && b.Seed.Kind == SeedParties:
		trust("parties", "that one of them is not the shop, and told nobody its secret before")
	}
	count := func(is func(Offer) bool) (n int) {
		for _, o := range b.Offers {
			if is(o) {
				n++
			}
		}
		return n
	}
	if n := count(func(o Offer) bool { return o.Outcome == Offered }); n > 0 {
		trust("orders", "that %d offers were orders of the entrants, and each unit that came back went to the next rank", n)
	}
	if n := count(func(o Offer) bool { return o.Reason == SkippedCancelled }); n > 0 {
		trust("cancelled", "why %d entries were cancelled after they closed", n)
	}
	switch g := b.Goods; {
	case g == nil:
		trust("stock", "the units and their items: version 1 does not publish them before the seed")
		if n := count(func(o Offer) bool { return o.Reason == SkippedHolder }); n > 0 {
			trust("holders", "that %d entrants who were skipped had an order", n)
		}
	case g.Sold > 0 || len(g.Holders) > 0:
		trust("holders", "that %d units were sold before the draw, and entrants at %d places had such an order", g.Sold,
			len(g.Holders))
	}
	if n := len(b.Restocks); n > 0 {
		last := b.Restocks[n-1]
		trust("restocks", "why the stock was changed after the list was frozen, %d times, the last time to %s at %s", n,
			last.stock(), last.At.UTC().Format(time.RFC3339))
	}
	return on
}
