// Package draw is the part of a draw that anyone can compute: the list of the entries and its root, the seed, the rank
// of each entry, and the verification of all that from two public files. It needs no server.
//
// A list is frozen, and its root published, before its seed exists. The rank of an entry then follows from the root's
// list and the seed alone, so nobody chooses who wins: neither an entrant nor the server.
package draw

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/reservation/order"
)

// MaxEntries is the most entries of a draw.
const MaxEntries = order.MaxStock

// RecordBytes is the length of a record. A list of entries, as a file, is their records by place, and nothing else.
const RecordBytes = 1 + sha256.Size

// Record is an entry in the list: the letter of its item, or 0 in a sale without items, and the SHA-256 of the body of
// its receipt. The random id of the order in the body hides the user. A receipt that is signed anew has the same body.
type Record [RecordBytes]byte

// ErrNoEntry is returned for an order that is not one unit of one item.
var ErrNoEntry = errors.New("an entry is an order of one unit")

// NewRecord returns the record of an entry.
func NewRecord(entry order.Receipt) (r Record, err error) {
	if entry.Quantity != 1 {
		return r, ErrNoEntry
	}
	if entry.Lines != "" {
		if lines, err := order.ParseLines(string(entry.Lines)); err != nil || lines.Units() != 1 {
			return r, ErrNoEntry
		}
		r[0] = entry.Lines[0]
	}
	body := sha256.Sum256(entry.AppendBody(make([]byte, 0, 512)))
	copy(r[1:], body[:])
	return r, nil
}

// Hash is a node of the tree over the list.
type Hash = tlog.Hash

// Leaf is the leaf of the record in the tree of RFC 6962: tlog.RecordHash without its allocations.
func (r Record) Leaf() Hash {
	var prefixed [1 + RecordBytes]byte
	copy(prefixed[1:], r[:])
	return sha256.Sum256(prefixed[:])
}

// treeLevels is enough for a million million leaves.
const treeLevels = 40

// Tree computes the root of a list, by RFC 6962, while it is read. The zero value is the empty tree.
type Tree struct {
	size int64
	// full has, where bit i of size is set, the root of a full subtree of 2^i leaves. A greater i is further left.
	full [treeLevels]Hash
}

// Add appends a leaf.
func (t *Tree) Add(leaf Hash) {
	level := 0
	for ; t.size>>level&1 == 1; level++ {
		leaf = tlog.NodeHash(t.full[level], leaf)
	}
	t.full[level] = leaf
	t.size++
}

// Root is the root of the leaves so far: tlog.TreeHash.
func (t *Tree) Root() Hash {
	root, found := Hash(sha256.Sum256(nil)), false
	for level, full := range t.full {
		switch {
		case t.size>>level&1 == 0:
		case found:
			root = tlog.NodeHash(full, root)
		default:
			root, found = full, true
		}
	}
	return root
}

// RootOf is the root of leaves, or of the roots of the chunks of a list.
func RootOf(leaves []Hash) Hash {
	var t Tree
	for _, leaf := range leaves {
		t.Add(leaf)
	}
	return t.Root()
}

// ChunkLeaves is how many leaves a chunk of a list has, but the last, which has fewer or as many. It is a power of two:
// the root of a chunk is a node of the tree, so the roots of all are enough to prove a leaf of one.
const ChunkLeaves = 1024

// Prove returns the proof that the leaf at a place, from 0, is in the list: tlog.ProveRecord. Chunks are the roots of
// all chunks of the list, and leaves those of the chunk with the place.
func Prove(chunks, leaves []Hash, place int64) (tlog.RecordProof, error) {
	chunk, leaf := place/ChunkLeaves, int(place%ChunkLeaves)
	if place < 0 || chunk >= int64(len(chunks)) || leaf >= len(leaves) ||
		chunk < int64(len(chunks))-1 && len(leaves) != ChunkLeaves || RootOf(leaves) != chunks[chunk] {
		return nil, fmt.Errorf("prove place %d: %d leaves are not chunk %d of %d", place, len(leaves), chunk, len(chunks))
	}
	return append(path(leaves, leaf), path(chunks, int(chunk))...), nil
}

// path returns the roots of the subtrees beside the way from the nth leaf to the root.
func path(leaves []Hash, n int) tlog.RecordProof {
	if len(leaves) == 1 {
		return tlog.RecordProof{}
	}
	left := 1
	for 2*left < len(leaves) {
		left *= 2
	}
	if n < left {
		return append(path(leaves[:left], n), RootOf(leaves[left:]))
	}
	return append(path(leaves[left:], n-left), RootOf(leaves[:left]))
}

// View is a draw as everybody sees it, in JSON. What is not known yet is left out. Times are those of order.AppendTime.
type View struct {
	Version       int       `json:"version"`
	SaleID        uuid.UUID `json:"sale_id"`
	EntriesSaleID uuid.UUID `json:"entries_sale_id"`
	State         string    `json:"state"`
	CreatedAt     string    `json:"created_at"`
	ClosesAt      string    `json:"closes_at"`
	FreezeSeconds int64     `json:"freeze_seconds"`
	// Rounds are the rounds so far, of which Round, the last one, gives the seed, from RoundAt on.
	Rounds  []int64 `json:"rounds,omitempty"`
	Round   int64   `json:"round,omitzero"`
	RoundAt string  `json:"round_at,omitempty"`
	// Parties are those that give the seed in place of a round, until RevealBy.
	Parties  []Party `json:"parties,omitempty"`
	RevealBy string  `json:"reveal_by,omitempty"`
	// Entries is nil until the list is frozen.
	Entries  *int64 `json:"entries,omitempty"`
	Root     Hex    `json:"root,omitempty"`
	FrozenAt string `json:"frozen_at,omitempty"`
	// Goods are the units when the list was frozen; nil in version 1.
	Goods     *Goods `json:"goods,omitempty"`
	Signature Hex    `json:"signature,omitempty"`
	Seed      Hex    `json:"seed,omitempty"`
	SeededAt  string `json:"seeded_at,omitempty"`
	RankedAt  string `json:"ranked_at,omitempty"`
	Offered   int64  `json:"offered"`
	Skipped   int64  `json:"skipped"`
	// LastRank is the last one that had its turn. Of a sale with items there is none: each item has its own.
	LastRank *int64 `json:"last_rank,omitempty"`
	// Opening is true if what is left is for everybody when each rank had its turn.
	Opening    bool   `json:"opening,omitzero"`
	VoidReason string `json:"void_reason,omitempty"`
	VoidedAt   string `json:"voided_at,omitempty"`
}

// Goods are the units that are drawn as they were when the list was frozen. A draw of version 1 does not publish them.
type Goods struct {
	// Revision is that of the sale, as of which this is true.
	Revision int64 `json:"revision"`
	Stock    int64 `json:"stock"`
	// Sold are the units of live orders: they are from before the draw, and no offers.
	Sold  int64  `json:"sold,omitzero"`
	Items []Item `json:"items,omitempty"`
	// Holders are the places of those entrants who have such an order. Nobody else can be skipped for one.
	Holders []Place `json:"holders,omitempty"`
}

// Place is a place in the list.
type Place int64

// Restock is a change of the stock after the list was frozen.
type Restock struct {
	// Revision is that of the sale which the change made.
	Revision int64     `json:"revision"`
	At       time.Time `json:"at"`
	// Stock, and that of the Items, is the one from then on.
	Stock int64  `json:"stock"`
	Items []Item `json:"items,omitempty"`
}

func (r *Restock) stock() string { return stockText(r.Stock, r.Items) }

func stockText(stock int64, items []Item) string {
	text := fmt.Sprintf("%d units", stock)
	if len(items) == 0 {
		return text
	}
	var each []string
	for _, item := range items {
		each = append(each, fmt.Sprintf("%q %d", item.Code, item.Stock))
	}
	return fmt.Sprintf("%s (%s)", text, strings.Join(each, ", "))
}

// stockFault returns what is wrong with the stock: it must be that of the freeze and of each change since.
func (b *Bundle) stockFault() string {
	if b.Goods == nil {
		return ""
	}
	before := Restock{Revision: b.Goods.Revision, Stock: b.Goods.Stock, Items: b.Goods.Items}
	for _, next := range b.Restocks {
		switch {
		case next.Revision <= before.Revision || next.Revision > b.Revision:
			return fmt.Sprintf("a change of the stock has revision %d, after %d and in a bundle of revision %d", next.Revision,
				before.Revision, b.Revision)
		case !slices.EqualFunc(before.Items, next.Items, func(a, b Item) bool { return a.Code == b.Code }):
			return fmt.Sprintf("a change of the stock to %s has other items than %s", next.stock(), before.stock())
		}
		before = next
	}
	if now := stockText(b.Stock, b.Items); before.stock() != now {
		return fmt.Sprintf("it has %s, and no change of the stock leads there from %s", now, before.stock())
	}
	sum := b.Stock
	for _, item := range b.Items {
		sum -= item.Stock
	}
	if len(b.Items) > 0 && sum != 0 {
		return fmt.Sprintf("it has %s, which is not their sum", before.stock())
	}
	return ""
}

// checkUnits checks that each unit was offered, or that no entrant is left for it.
func (v *verifier) checkUnits() Check {
	const name = "units"
	if fault := v.stockFault(); fault != "" {
		return Check{name, Broken, fault}
	}
	if v.seed == nil {
		return checked(name, Unknown, "not checked without the seed")
	}
	turns, offered := map[string]int64{}, map[string]int64{}
	for _, o := range v.Offers {
		if turns[o.Item]++; o.Outcome == Offered {
			offered[o.Item]++
		}
	}
	items := v.Items
	if len(items) == 0 {
		items = []Item{{Stock: v.Stock}}
	}
	waiting := int64(0)
	for i, item := range items {
		units := item.Stock - v.soldBefore(i)
		waiting += max(0, min(units-offered[item.Code], v.entries[v.letters[item.Code]]-turns[item.Code]))
	}
	if waiting > 0 {
		return checked(name, Unknown, "of %s, %d were not offered, and entrants are left for them: the draw goes on, or "+
			"they are withheld", stockText(v.Stock, v.Items), waiting)
	}
	return checked(name, Kept, "%s: each was offered, or no entrant is left for it", stockText(v.Stock, v.Items))
}

// soldBefore are the units of an item, or of a sale without items, that were sold before the draw.
func (b *Bundle) soldBefore(item int) int64 {
	switch {
	case b.Goods == nil:
		return 0
	case item < len(b.Goods.Items):
		return b.Goods.Items[item].Sold
	}
	return b.Goods.Sold
}

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
