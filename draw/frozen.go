package draw

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Frozen is what is public of a draw before its seed exists: the data of the event stampede.draw.frozen. Who kept it
// knows that list, times and parties were not chosen for their seed.
type Frozen struct {
	SaleID        uuid.UUID `json:"sale_id,omitzero"`
	EntriesSaleID uuid.UUID `json:"entries_sale_id"`
	Entries       int64     `json:"entries"`
	Root          Hex       `json:"root"`
	FrozenAt      time.Time `json:"frozen_at"`
	Rounds        []int64   `json:"rounds,omitempty"`
	ClosesAt      time.Time `json:"closes_at"`
	FreezeSeconds int64     `json:"freeze_seconds"`
	Parties       []Party   `json:"parties,omitempty"`
}

// Seeded is the data of the event stampede.draw.seeded.
type Seeded struct {
	Seed      Hex     `json:"seed"`
	Round     int64   `json:"round,omitempty"`
	Signature Hex     `json:"signature,omitempty"`
	Parties   []Party `json:"parties,omitempty"`
}

// ErrFrozen is returned for a text that does not have what is public of a draw before its seed exists.
var ErrFrozen = errors.New("not what was published of a frozen draw")

// ParseFrozen reads what somebody kept: the event, its data, or a View without a seed. The error is ErrFrozen.
func ParseFrozen(text []byte) (*Frozen, error) {
	var event struct {
		Data jsontext.Value `json:"data"`
	}
	var kept struct {
		Frozen
		Seed Hex `json:"seed"`
	}
	err := json.Unmarshal(text, &event)
	if event.Data != nil {
		text = event.Data
	}
	if err == nil {
		err = json.Unmarshal(text, &kept)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrFrozen, err)
	case len(kept.Root) == 0:
		return nil, fmt.Errorf("%w: it has no root", ErrFrozen)
	case len(kept.Seed) > 0:
		return nil, fmt.Errorf("%w: it has the seed, so it was made later", ErrFrozen)
	}
	return &kept.Frozen, nil
}

// Difference returns the first thing that is not the same in both, "" if there is none. Secrets do not count, nor parts
// of a millisecond.
func (f *Frozen) Difference(other *Frozen) string {
	theirs := other.statements()
	for i, own := range f.statements() {
		if own != theirs[i] {
			return fmt.Sprintf("%s, and not %s", own, theirs[i])
		}
	}
	return ""
}

func (f *Frozen) statements() []string {
	parties := []string{}
	for _, p := range f.Parties {
		parties = append(parties, fmt.Sprintf("%q with %x", p.Name, []byte(p.Commitment)))
	}
	return []string{
		"the sale " + f.SaleID.String(),
		"the entries of sale " + f.EntriesSaleID.String(),
		fmt.Sprintf("%d entries", f.Entries),
		fmt.Sprintf("the root %x", []byte(f.Root)),
		fmt.Sprintf("the end of the entries at %s", order.AppendTime(nil, f.ClosesAt)),
		fmt.Sprintf("a freeze of %d seconds", f.FreezeSeconds),
		fmt.Sprintf("a list that was frozen at %s", order.AppendTime(nil, f.FrozenAt)),
		fmt.Sprintf("the parties %v", parties),
		fmt.Sprintf("the rounds %v", f.Rounds),
	}
}

// Compare compares the bundle with what somebody kept of the draw; nil if nobody has.
func (b *Bundle) Compare(kept *Frozen) Check {
	const name = "witness"
	if kept == nil {
		return checked(name, Unchecked, "root, times and parties may be newer than the seed: compare them with the event "+
			"stampede.draw.frozen")
	}
	own := Frozen{
		SaleID: b.SaleID, EntriesSaleID: b.EntriesSaleID, Entries: b.Entries, Root: b.Root, FrozenAt: b.FrozenAt,
		Rounds: b.Rounds, ClosesAt: b.ClosesAt, FreezeSeconds: b.FreezeSeconds, Parties: kept.Parties,
	}
	if b.Seed != nil {
		own.Parties = b.Seed.Parties
	}
	if differs := kept.Difference(&own); differs != "" {
		return checked(name, Broken, "before the seed existed, it was %s", differs)
	}
	return checked(name, Kept, "root, times and parties are those that were published before the seed existed")
}
