package draw

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cloudflare/circl/sign/bls"
	"github.com/google/uuid"
)

// QuicknetChain is the hash of the chain drand quicknet, whose rounds are the seeds.
const QuicknetChain = "52db9ba70e0cc0f6eaf7803dd07447a1f5477735fd3f661792ba94600c84e971"

// The chain has the scheme bls-unchained-g1-rfc9380. A round's signature exists when the time of the round has come,
// not before; it is the only one that fits the key and the round.
const (
	quicknetKey = "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c" +
		"8c4b450b6a0a6c3ac6a5776a2d1064510d1fec758c921cc22b0e17e63aaf4bcb" +
		"5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
	quicknetGenesis = 1692803367 // Unix seconds of round 1
	quicknetPeriod  = 3          // seconds
	signatureBytes  = 48
)

var quicknet = sync.OnceValue(func() *bls.PublicKey[bls.KeyG2SigG1] {
	key := new(bls.PublicKey[bls.KeyG2SigG1])
	raw, err := hex.DecodeString(quicknetKey)
	if err == nil {
		err = key.UnmarshalBinary(raw)
	}
	if err != nil {
		panic(err) // the constant is wrong
	}
	return key
})

// ErrBeacon is returned for what is not the signature of that round of drand quicknet.
var ErrBeacon = errors.New("not the signature of the round of drand quicknet")

// BeaconSeed returns the randomness of a round of drand quicknet, after verifying its signature: 48 bytes, a compressed
// point of G1 in the subgroup and not at infinity.
func BeaconSeed(round int64, signature []byte) (Seed, error) {
	// The library takes an uncompressed point as well: the same signature would give another seed.
	if round < 1 || len(signature) != signatureBytes {
		return Seed{}, fmt.Errorf("round %d, %d bytes: %w", round, len(signature), ErrBeacon)
	}
	message := sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(round)))
	if !bls.Verify(quicknet(), message[:], signature) {
		return Seed{}, fmt.Errorf("round %d: %w", round, ErrBeacon)
	}
	return sha256.Sum256(signature), nil
}

// RoundAt is the first round of drand quicknet at this time or later.
func RoundAt(t time.Time) int64 {
	since := t.Unix() - quicknetGenesis
	if t.Nanosecond() > 0 {
		since++
	}
	return 1 + (max(since, 0)+quicknetPeriod-1)/quicknetPeriod
}

// RoundTime is the time from which on a round can be known.
func RoundTime(round int64) time.Time {
	return time.Unix(quicknetGenesis+(round-1)*quicknetPeriod, 0).UTC()
}

// FreezeMin and FreezeMax bound how long after the end of the entries the first round of a draw is. FreezeMin is longer
// than a round, so that the rounds of a draw differ.
const (
	FreezeMin = 10 * time.Second
	FreezeMax = 24 * time.Hour
)

// roundsMax is how many rounds a draw has before it is void.
const roundsMax = 3

// Rounds returns the rounds of a draw up to the one that gives its seed. The first is the first round at or after the
// end of the entries and the freeze; each further one is a freeze later. The seed is the first before which the list
// was frozen. It is nil if the list was not frozen before the third: the draw is void.
func Rounds(closesAt time.Time, freeze time.Duration, frozenAt time.Time) (rounds []int64) {
	for try := range roundsMax {
		round := RoundAt(closesAt.Add(time.Duration(try+1) * freeze))
		rounds = append(rounds, round)
		if frozenAt.Before(RoundTime(round)) {
			return rounds
		}
	}
	return nil
}

// LastRound is the round before which the list must be frozen: after it the draw is void.
func LastRound(closesAt time.Time, freeze time.Duration) int64 {
	return RoundAt(closesAt.Add(roundsMax * freeze))
}

// RevealBy is until when parties reveal their secrets, for a list that was frozen at this time: in an hour, or in three
// freeze times if that is longer.
func RevealBy(frozenAt time.Time, freeze time.Duration) time.Time {
	return frozenAt.Add(max(time.Hour, 3*freeze))
}

// The reasons for which a draw is void. There are no others.
const (
	VoidLate   = "the list of the entries was not frozen before the last round"
	VoidSilent = "a party has not revealed its secret in time"
	VoidEarly  = "its round was known before its time by the clock of Postgres, which was behind: the list may have " +
		"been frozen when the seed was public"
)

// Party has a share in the seed of a draw without drand: the commitment to a secret before the list is frozen, and the
// secret thereafter. One honest party is enough to keep the seed unknown until then.
type Party struct {
	Name       string `json:"name"`
	Commitment Hex    `json:"commitment"`
	Secret     Hex    `json:"secret,omitempty"`
}

const (
	partiesMax   = 16
	partyNameMax = 64
)

// ErrParties is returned for parties that give no seed.
var ErrParties = errors.New("the parties give no seed")

// Verify returns ErrParties if the secret is missing, or is not the one of the commitment.
func (p Party) Verify() error {
	switch sum := sha256.Sum256(p.Secret); {
	case p.Name == "" || len(p.Name) > partyNameMax || len(p.Commitment) != len(sum):
		return fmt.Errorf("%w: a party needs a name of 1 to %d bytes and a commitment of 32", ErrParties, partyNameMax)
	case len(p.Secret) == 0:
		return fmt.Errorf("%w: %q has not revealed its secret", ErrParties, p.Name)
	case len(p.Secret) != len(sum) || string(sum[:]) != string(p.Commitment):
		return fmt.Errorf("%w: the secret of %q is not what it committed to", ErrParties, p.Name)
	}
	return nil
}

// The versions of draws. A draw keeps the one that it was created with: what is public of it says which.
const (
	// FirstVersion: a seed of parties follows from their secrets alone.
	FirstVersion = 1
	// Version is that of new draws: such a seed also follows from the sale that is drawn, the root and the commitments, so
	// secrets that are known from another draw tell nothing about this one. The units are published with the root.
	Version = 2
)

// PartiesSeed returns the seed of a draw of this version, of this sale and with this root, from the secrets of all
// parties, in the order in which they committed.
func PartiesSeed(version int, goods uuid.UUID, root []byte, parties []Party) (Seed, error) {
	if len(parties) == 0 || len(parties) > partiesMax {
		return Seed{}, fmt.Errorf("%w: %d parties, want 1 to %d", ErrParties, len(parties), partiesMax)
	}
	var commitments, secrets []byte
	seen := map[string]bool{}
	for _, p := range parties {
		if err := p.Verify(); err != nil {
			return Seed{}, err
		}
		// A party that repeats what another committed to adds nothing that is its own.
		if seen[string(p.Commitment)] {
			return Seed{}, fmt.Errorf("%w: %q repeats the commitment of another party", ErrParties, p.Name)
		}
		seen[string(p.Commitment)] = true
		commitments, secrets = append(commitments, p.Commitment...), append(secrets, p.Secret...)
	}
	switch version {
	case FirstVersion:
		return sha256.Sum256(slices.Concat([]byte("stampede draw seed"), secrets)), nil
	case Version:
		return sha256.Sum256(slices.Concat([]byte("stampede draw seed 2"), goods[:], root, commitments, secrets)), nil
	}
	return Seed{}, fmt.Errorf("%w: version %d is not known", ErrParties, version)
}

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
