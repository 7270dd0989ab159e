package draw

import (
	"fmt"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// Frozen is what is public of a draw before its seed exists: the data of the event stampede.draw.frozen. Who kept it
// knows that list, times and parties were not chosen for their seed.
type Frozen struct {
	// Version is that of the draw; 0 in what was published of the first version.
	Version       int       `json:"version,omitzero"`
	SaleID        uuid.UUID `json:"sale_id,omitzero"`
	EntriesSaleID uuid.UUID `json:"entries_sale_id"`
	Entries       int64     `json:"entries"`
	Root          Hex       `json:"root"`
	FrozenAt      time.Time `json:"frozen_at"`
	Rounds        []int64   `json:"rounds,omitempty"`
	ClosesAt      time.Time `json:"closes_at"`
	FreezeSeconds int64     `json:"freeze_seconds"`
	Parties       []Party   `json:"parties,omitempty"`
	// Goods is nil in version 1.
	Goods *Goods `json:"goods,omitempty"`
}

// Seeded is the data of the event stampede.draw.seeded.
type Seeded struct {
	Seed      Hex     `json:"seed"`
	Round     int64   `json:"round,omitempty"`
	Signature Hex     `json:"signature,omitempty"`
	Parties   []Party `json:"parties,omitempty"`
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
		fmt.Sprintf("a draw of version %d", max(f.Version, FirstVersion)),
		"the sale " + f.SaleID.String(),
		"the entries of sale " + f.EntriesSaleID.String(),
		fmt.Sprintf("%d entries", f.Entries),
		fmt.Sprintf("the root %x", []byte(f.Root)),
		fmt.Sprintf("the end of the entries at %s", order.AppendTime(nil, f.ClosesAt)),
		fmt.Sprintf("a freeze of %d seconds", f.FreezeSeconds),
		fmt.Sprintf("a list that was frozen at %s", order.AppendTime(nil, f.FrozenAt)),
		fmt.Sprintf("the parties %v", parties),
		fmt.Sprintf("the rounds %v", f.Rounds),
		f.Goods.statement(),
	}
}

func (g *Goods) statement() string {
	if g == nil {
		return "no goods"
	}
	sold := []int64{g.Sold}
	for _, item := range g.Items {
		sold = append(sold, item.Sold)
	}
	return fmt.Sprintf("at revision %d %s, of which %v were sold to entrants at the places %v and to others", g.Revision,
		stockText(g.Stock, g.Items), sold, g.Holders)
}
