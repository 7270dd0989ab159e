package draw

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"stampede/reservation/order"
)

// Verdict is what a check came to.
type Verdict string

// The verdicts.
const (
	Kept    Verdict = "kept"
	Broken  Verdict = "broken"
	Unknown Verdict = "unknown"
	// Unchecked: a file would be needed that was not given.
	Unchecked Verdict = "unchecked"
	// Trusted: no file proves it.
	Trusted Verdict = "trusted"
)

// Check is one part of a verification, with a sentence on what was found.
type Check struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Text    string  `json:"text"`
}

func checked(name string, verdict Verdict, format string, a ...any) Check {
	return Check{name, verdict, fmt.Sprintf(format, a...)}
}

// Report is the checks of a draw: of its list, its seed, its ranks, its units and, if there is one, the receipt.
type Report []Check

// Has reports whether a check came to the verdict.
func (r Report) Has(verdict Verdict) bool {
	return slices.ContainsFunc(r, func(c Check) bool { return c.Verdict == verdict })
}

// Summary is what all checks come to, in a sentence that names what was taken on trust.
func (r Report) Summary() string {
	names := func(verdict Verdict) (all []string) {
		for _, c := range r {
			if c.Verdict == verdict {
				all = append(all, c.Name)
			}
		}
		return all
	}
	text := "All that the files can prove was kept."
	if broken := names(Broken); len(broken) > 0 {
		text = fmt.Sprintf("Broken: %s.", strings.Join(broken, ", "))
	} else if unknown := names(Unknown); len(unknown) > 0 {
		text = fmt.Sprintf("Not decided: %s.", strings.Join(unknown, ", "))
	}
	return fmt.Sprintf("%s Taken on trust: %s.", text, strings.Join(append(names(Unchecked), names(Trusted)...), ", "))
}

// Verify verifies a draw from its bundle and the list of its entries, which has so many bytes, in one pass and in the
// memory that the ranks of the bundle take. With a receipt it finds its entry; the signature of the receipt is not
// verified, because it needs the secret of the server and is not part of the list. The error is that of the list or the
// context.
func Verify(ctx context.Context, b *Bundle, list io.ReaderAt, bytes int64, own *order.Receipt) (Report, error) {
	if want := b.Entries * RecordBytes; bytes != want {
		return Report{checked("list", Broken, "the file has %d bytes, want %d for %d entries", bytes, want, b.Entries)}, nil
	}
	seed, seedCheck := b.checkSeed()
	v := &verifier{Bundle: b, seed: seed, letters: b.letters(), missed: -1, place: -1}
	if b.Goods != nil {
		v.holders = map[Place]bool{}
		for _, place := range b.Goods.Holders {
			v.holders[place] = true
		}
	}
	if own != nil {
		if record, err := NewRecord(*own); err == nil {
			v.own = &record
		}
	}
	fault, err := v.readOffers(list)
	if err == nil {
		err = v.readList(ctx, io.NewSectionReader(list, 0, bytes))
	}
	if err != nil {
		return nil, err
	}
	report := Report{v.checkList(), seedCheck, v.checkRanks(fault), v.checkUnits()}
	if own != nil {
		report = append(report, v.checkReceipt(*own))
	}
	return report, nil
}

// checkSeed returns the seed if it is the one that the rule of the draw gives.
func (b *Bundle) checkSeed() (*Seed, Check) {
	broken := func(format string, a ...any) (*Seed, Check) {
		return nil, checked("seed", Broken, format, a...)
	}
	switch {
	case b.Seed == nil && b.Goods != nil && (len(b.Parties) > 0) == (len(b.Rounds) > 0):
		return broken("neither parties nor rounds give it, or both do")
	case b.VoidReason != "":
		if refuted := b.refuteVoid(); refuted != "" {
			return broken("the draw is void (%s), but %s", b.VoidReason, refuted)
		}
		return nil, checked("seed", Unknown, "there is none, and the draw is void: %s", b.VoidReason)
	case b.Seed == nil && len(b.Offers) > 0:
		return broken("there are offers, but no seed")
	case b.Seed == nil:
		return nil, checked("seed", Unknown, "there is no seed yet")
	case b.FrozenAt.Before(b.ClosesAt):
		return broken("the list was frozen before the entries closed")
	case b.Seed.Kind == SeedParties:
		seed, err := PartiesSeed(b.Version, b.SaleID, b.Root, b.Seed.Parties)
		if err != nil {
			return broken("%v", err)
		}
		return &seed, checked("seed", Kept, "the secrets of %d parties are those of their commitments", len(b.Seed.Parties))
	case b.Seed.Kind != SeedDrand:
		return broken("%q is no kind of seed", b.Seed.Kind)
	case b.FreezeSeconds < int64(FreezeMin/time.Second) || b.FreezeSeconds > int64(FreezeMax/time.Second):
		return broken("the freeze has %d seconds, want %v to %v", b.FreezeSeconds, FreezeMin, FreezeMax)
	}
	rounds := Rounds(b.ClosesAt, time.Duration(b.FreezeSeconds)*time.Second, b.FrozenAt)
	if rounds == nil {
		return broken("the list was frozen after the last round, so the draw is void")
	}
	if last := rounds[len(rounds)-1]; b.Seed.Round != last || !slices.Equal(rounds, b.Rounds) {
		return broken("the rounds are %v and the seed is of round %d, but the rule gives %v", b.Rounds, b.Seed.Round, rounds)
	}
	seed, err := BeaconSeed(b.Seed.Round, b.Seed.Signature)
	if err != nil {
		return broken("%v", err)
	}
	return &seed, checked("seed", Kept, "the list was frozen at %s, round %d of drand quicknet is of %s, and its signature "+
		"is valid", b.FrozenAt.UTC().Format(time.RFC3339), b.Seed.Round, RoundTime(b.Seed.Round).Format(time.RFC3339))
}

// refuteVoid returns what refutes the reason for which the draw is void, or "".
func (b *Bundle) refuteVoid() string {
	freeze := time.Duration(b.FreezeSeconds) * time.Second
	rounds := Rounds(b.ClosesAt, freeze, b.FrozenAt)
	revealBy := RevealBy(b.FrozenAt, freeze)
	isSilent := func(p Party) bool { return p.Verify() != nil }
	switch {
	case b.Seed != nil || len(b.Offers) > 0:
		return "it has a seed or offers"
	case b.VoidReason == VoidLate && rounds != nil:
		return "its list was frozen before a round of drand that gives the seed"
	case b.VoidReason == VoidLate:
	case b.VoidReason == VoidSilent && len(b.Rounds) > 0:
		return "a round of drand gives its seed"
	case b.VoidReason == VoidSilent && b.Goods != nil && !slices.ContainsFunc(b.Parties, isSilent):
		return "each party has revealed its secret"
	case b.VoidReason == VoidSilent && b.Goods != nil && !b.VoidedAt.After(revealBy):
		return fmt.Sprintf("that was at %s, and secrets are in time until %s", b.VoidedAt.UTC().Format(time.RFC3339),
			revealBy.UTC().Format(time.RFC3339))
	case b.VoidReason == VoidSilent:
	case b.VoidReason == VoidEarly && (len(rounds) == 0 || len(b.Rounds) == 0):
		return "no round gives its seed"
	case b.VoidReason == VoidEarly && b.Goods != nil && !b.VoidedAt.Before(RoundTime(rounds[len(rounds)-1])):
		return fmt.Sprintf("that was at %s, when its round was to be known", b.VoidedAt.UTC().Format(time.RFC3339))
	case b.VoidReason == VoidEarly:
	default:
		return "no rule has this reason"
	}
	return ""
}

// letters returns the letters of the items by code, or that of no item.
func (b *Bundle) letters() map[string]byte {
	if len(b.Items) == 0 {
		return map[string]byte{"": 0}
	}
	letters := make(map[string]byte, len(b.Items))
	for i, item := range b.Items {
		letters[item.Code] = order.ItemLetter(i)[0]
	}
	return letters
}

// verifier is the state of one pass over the list.
type verifier struct {
	*Bundle
	seed    *Seed // nil if it is not known, or not the one of the rule
	letters map[string]byte
	holders map[Place]bool // of Goods; nil in version 1

	// The scores of the offers by the letter of the item, in the order of their ranks.
	scores [256][]Score

	root    Hash
	entries [256]int64 // by the letter of the item
	hits    int        // entries with a score of an offer
	// missed is the place of an entry without an offer that comes before the rank missedRank of its item, or -1.
	missed, missedRank int64

	own   *Record // of the receipt, or nil
	place int64   // of its entry, or -1
	lower int64   // entries of its item with a lower score: its rank
}

// readOffers reads the scores of all offers, and returns what is wrong with the first that is not next.
func (v *verifier) readOffers(list io.ReaderAt) (fault string, err error) {
	if v.seed == nil {
		return "", nil
	}
	for _, o := range v.Offers {
		letter, known := v.letters[o.Item]
		next := v.scores[letter]
		switch {
		case !known:
			return fmt.Sprintf("rank %d is of %q, which is no item of the sale", o.Rank, o.Item), nil
		case o.Rank != int64(len(next)):
			return fmt.Sprintf("rank %d%s stands where rank %d is next", o.Rank, of(o.Item), len(next)), nil
		case o.Outcome == Skipped && o.Reason != SkippedHolder && o.Reason != SkippedCancelled,
			o.Outcome != Skipped && (o.Outcome != Offered || o.Reason != ""):
			return fmt.Sprintf("rank %d%s has the outcome %q and the reason %q", o.Rank, of(o.Item), o.Outcome, o.Reason), nil
		case o.Reason == SkippedHolder && v.holders != nil && !v.holders[Place(o.Place)]:
			return fmt.Sprintf("rank %d%s was skipped for an order that its entrant did not have when the list was frozen",
				o.Rank, of(o.Item)), nil
		case o.Place < 0 || o.Place >= v.Entries:
			return fmt.Sprintf("rank %d%s is at place %d of %d", o.Rank, of(o.Item), o.Place, v.Entries), nil
		}
		var record Record
		if _, err := list.ReadAt(record[:], o.Place*RecordBytes); err != nil {
			return "", err
		}
		score := v.seed.Score(record.Leaf())
		switch {
		case record[0] != letter:
			return fmt.Sprintf("rank %d%s has place %d, whose entry is of another item", o.Rank, of(o.Item), o.Place), nil
		case len(next) > 0 && score.compare(next[len(next)-1]) <= 0:
			return fmt.Sprintf("rank %d%s has place %d, whose score is not above that of the rank before", o.Rank, of(o.Item),
				o.Place), nil
		}
		v.scores[letter] = append(next, score)
	}
	return "", nil
}

// readList makes the pass.
func (v *verifier) readList(ctx context.Context, list io.Reader) error {
	var own Score
	if v.own != nil && v.seed != nil {
		own = v.seed.Score(v.own.Leaf())
	}
	buffered := bufio.NewReaderSize(list, 1<<16)
	var tree Tree
	var record Record
	for place := range v.Entries {
		if place%(1<<16) == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if _, err := io.ReadFull(buffered, record[:]); err != nil {
			return err
		}
		leaf := record.Leaf()
		tree.Add(leaf)
		v.entries[record[0]]++
		if v.own != nil && record == *v.own && v.place < 0 {
			v.place = place
		}
		if v.seed == nil {
			continue
		}
		score := v.seed.Score(leaf)
		if v.own != nil && record[0] == v.own[0] && score.compare(own) < 0 {
			v.lower++
		}
		offered := v.scores[record[0]]
		if len(offered) == 0 || score.compare(offered[len(offered)-1]) > 0 {
			continue
		}
		if rank, found := slices.BinarySearchFunc(offered, score, Score.compare); found {
			v.hits++
		} else if v.missed < 0 {
			v.missed, v.missedRank = place, int64(rank)
		}
	}
	v.root = tree.Root()
	return nil
}

func (v *verifier) checkList() Check {
	ofItems := int64(0)
	for _, letter := range v.letters {
		ofItems += v.entries[letter]
	}
	switch {
	case string(v.root[:]) != string(v.Root):
		return checked("list", Broken, "the root of the file is %x, but that of the draw is %x", v.root[:], []byte(v.Root))
	case ofItems != v.Entries:
		return checked("list", Broken, "%d entries are of no item of the sale", v.Entries-ofItems)
	}
	return checked("list", Kept, "%d entries with the root %x", v.Entries, v.root[:])
}

func (v *verifier) checkRanks(fault string) Check {
	skipped := 0
	for _, o := range v.Offers {
		if o.Outcome == Skipped {
			skipped++
		}
	}
	switch {
	case v.seed == nil:
		return checked("ranks", Unknown, "not checked without the seed")
	case fault != "":
		return Check{"ranks", Broken, fault}
	case v.missed >= 0:
		return checked("ranks", Broken, "the entry at place %d comes before rank %d, and was neither offered nor skipped",
			v.missed, v.missedRank)
	case v.hits != len(v.Offers):
		return checked("ranks", Broken, "an entry of a rank is in the list twice")
	}
	return checked("ranks", Kept, "%d offered and %d skipped for a reason: the lowest, without a gap",
		len(v.Offers)-skipped, skipped)
}

func (v *verifier) checkReceipt(own order.Receipt) Check {
	switch {
	case own.SaleID != v.EntriesSaleID:
		return checked("receipt", Broken, "it is of sale %s, not of the entries", own.SaleID)
	case v.place < 0:
		return checked("receipt", Broken, "it is not in the list")
	case v.seed == nil:
		return checked("receipt", Kept, "it is in the list at place %d", v.place)
	}
	ranks := int64(len(v.scores[v.own[0]]))
	outcome := "no rank was offered yet"
	if v.lower < ranks {
		i := slices.IndexFunc(v.Offers, func(o Offer) bool { return o.Place == v.place })
		if outcome = "offered"; i >= 0 && v.Offers[i].Outcome == Skipped {
			outcome = "skipped: " + string(v.Offers[i].Reason)
		}
	} else if ranks > 0 {
		outcome = fmt.Sprintf("not offered: the last rank that was is %d", ranks-1)
	}
	return checked("receipt", Kept, "it is in the list at place %d, rank %d of %d; %s", v.place, v.lower,
		v.entries[v.own[0]], outcome)
}

// of names an item.
func of(item string) string {
	if item == "" {
		return ""
	}
	return fmt.Sprintf(" of %q", item)
}
