package draw

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
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

// Ranking has the ranks of all entries of a list. It needs 12 bytes for each.
type Ranking struct {
	seed Seed
	keys []rankKey
}

// rankKey is an entry. Its order is that of the item and then the score: high and low begin with the item, and go on
// with the first 7 bytes of the score. Once all are sorted, high is the rank of the entry at that place instead.
type rankKey struct{ high, low, place uint32 }

// NewRanking makes a Ranking for so many entries.
func NewRanking(seed Seed, entries int64) *Ranking {
	return &Ranking{seed, make([]rankKey, 0, entries)}
}

// Add appends an entry: the next place.
func (r *Ranking) Add(record Record) {
	score := r.seed.Score(record.Leaf())
	// Items are in the order a to z, then A to Z.
	first := uint32(record[0]^0x20)<<24 | uint32(score[0])<<16 | uint32(score[1])<<8 | uint32(score[2])
	r.keys = append(r.keys, rankKey{first, binary.BigEndian.Uint32(score[3:]), uint32(len(r.keys))})
}

// Sort ranks all entries, and returns how many ranks each item has, by its letter; 0 in a sale without items. Record
// returns the entry at a place. It is asked for those whose scores begin alike, of which a million entries have none.
func (r *Ranking) Sort(record func(place int64) (Record, error)) (entries map[byte]int64, err error) {
	slices.SortFunc(r.keys, func(a, b rankKey) int {
		return cmp.Or(cmp.Compare(a.high, b.high), cmp.Compare(a.low, b.low), cmp.Compare(a.place, b.place))
	})
	for from, to := 0, 1; from < len(r.keys); from, to = to, to+1 {
		for ; to < len(r.keys) && r.keys[to].high == r.keys[from].high && r.keys[to].low == r.keys[from].low; to++ {
		}
		if to-from > 1 {
			if err := r.sortAlike(r.keys[from:to], record); err != nil {
				return nil, err
			}
		}
	}
	entries = map[byte]int64{}
	for i := range r.keys {
		letter := byte(r.keys[i].high>>24) ^ 0x20
		// low is the rank from here on. high is still needed: it has the item of later keys.
		r.keys[i].low = uint32(entries[letter])
		entries[letter]++
	}
	for i := range r.keys {
		r.keys[r.keys[i].place].high = r.keys[i].low
	}
	return entries, nil
}

// sortAlike sorts entries by their whole scores.
func (r *Ranking) sortAlike(keys []rankKey, record func(int64) (Record, error)) error {
	scores := make(map[uint32]Score, len(keys))
	for _, key := range keys {
		its, err := record(int64(key.place))
		if err != nil {
			return err
		}
		scores[key.place] = r.seed.Score(its.Leaf())
	}
	slices.SortFunc(keys, func(a, b rankKey) int {
		return cmp.Or(scores[a.place].compare(scores[b.place]), cmp.Compare(a.place, b.place))
	})
	return nil
}

// Rank is the rank of the entry at a place, after Sort.
func (r *Ranking) Rank(place int64) uint32 { return r.keys[place].high }

// Place is the nth place in the order of the ranks, after Sort: one item follows the other.
func (r *Ranking) Place(n int64) uint32 { return r.keys[n].place }
