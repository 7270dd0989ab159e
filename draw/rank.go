package draw

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"slices"
)

// Seed is what nobody knew when the list was frozen.
type Seed [sha256.Size]byte

// Score orders the entries: the rank of an entry is how many of its item have a lower one.
type Score [sha256.Size]byte

// Score returns the score of an entry.
func (s Seed) Score(leaf Hash) Score {
	var both [2 * sha256.Size]byte
	copy(both[copy(both[:], s[:]):], leaf[:])
	return sha256.Sum256(both[:])
}

func (s Score) compare(other Score) int { return bytes.Compare(s[:], other[:]) }

// Ranked is an entry by its place in the list, with its score.
type Ranked struct {
	Place int64
	Score Score
}

// Lowest keeps the k lowest scores above one, in memory for 2k.
type Lowest struct {
	k     int
	above Score
	// kept has at most 2k; all that were dropped are higher than the first k. Once k are sorted, none above limit counts.
	kept  []Ranked
	limit *Score
}

// NewLowest makes a Lowest for k scores, k > 0, that are greater than above: the zero score for the first ranks, or the
// score of the last rank that is known.
func NewLowest(k int, above Score) *Lowest { return &Lowest{k: k, above: above} }

// Add offers an entry.
func (l *Lowest) Add(place int64, score Score) {
	if score.compare(l.above) <= 0 || l.limit != nil && score.compare(*l.limit) > 0 {
		return
	}
	l.kept = append(l.kept, Ranked{place, score})
	if len(l.kept) == 2*l.k {
		l.Ranks()
	}
}

// Ranks returns the lowest of the entries so far, the lowest first; equal scores by place. The next Add invalidates it.
func (l *Lowest) Ranks() []Ranked {
	slices.SortFunc(l.kept, func(a, b Ranked) int {
		return cmp.Or(a.Score.compare(b.Score), cmp.Compare(a.Place, b.Place))
	})
	if len(l.kept) >= l.k {
		l.kept = l.kept[:l.k]
		limit := l.kept[l.k-1].Score
		l.limit = &limit
	}
	return l.kept
}
