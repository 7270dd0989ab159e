package draw_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/reservation/order"
)

// drawn is a draw as strangers get it, with what only its server knows.
type drawn struct {
	draw.Bundle
	list    []byte
	entries []order.Receipt
	own     *order.Receipt
	seed    draw.Seed
}

const someRound = 32285085

// newDraw makes a draw of 500 entries and 16 units, or 8 of each item. Each fifth rank is skipped.
func newDraw(t testing.TB, items ...string) *drawn {
	t.Helper()
	const entries = 500
	d := &drawn{Bundle: draw.Bundle{
		Version: draw.Version,
		SaleID:  uuid.New(), EntriesSaleID: entriesSale, Entries: entries,
		ClosesAt: draw.RoundTime(someRound).Add(-time.Minute), FreezeSeconds: 60,
		FrozenAt: draw.RoundTime(someRound).Add(-time.Second), Rounds: []int64{someRound},
		Seed: &draw.Source{
			Kind: draw.SeedDrand, Round: someRound, Signature: unhex(t, beacons[someRound].signature),
		},
		Stock: 16, Offers: []draw.Offer{}, Revision: 4, Goods: &draw.Goods{Revision: 2, Stock: 16},
	}}
	lowest := map[byte]*draw.Lowest{0: draw.NewLowest(20, draw.Score{})}
	codes := map[byte]string{0: ""}
	if len(items) > 0 {
		clear(lowest)
	}
	for i, code := range items {
		letter := order.ItemLetter(i)[0]
		d.Items, d.Stock = append(d.Items, draw.Item{Code: code, Stock: 8}), int64(8*(i+1))
		lowest[letter], codes[letter] = draw.NewLowest(10, draw.Score{}), code
	}
	var err error
	d.seed, err = draw.BeaconSeed(someRound, d.Seed.Signature)
	require.NoError(t, err)
	for place := range int64(entries) {
		lines := order.Lines("")
		if len(items) > 0 {
			lines = order.Lines(order.ItemLetter(int(place)%len(items)) + "1")
		}
		entry := someEntry(place, lines)
		d.entries = append(d.entries, entry)
		r := record(t, entry)
		d.list = append(d.list, r[:]...)
		lowest[r[0]].Add(place, d.seed.Score(r.Leaf()))
	}
	d.reroot()
	for letter, l := range lowest {
		for rank, ranked := range l.Ranks() {
			offer := draw.Offer{Rank: int64(rank), Place: ranked.Place, Item: codes[letter], Outcome: draw.Offered}
			if rank%5 == 4 {
				offer.Outcome, offer.Reason = draw.Skipped, []draw.Reason{draw.SkippedHolder, draw.SkippedCancelled}[rank/5%2]
			}
			if offer.Reason == draw.SkippedHolder {
				d.Goods.Holders = append(d.Goods.Holders, draw.Place(ranked.Place))
			}
			d.Offers = append(d.Offers, offer)
		}
	}
	d.Goods.Stock, d.Goods.Items = d.Stock, slices.Clone(d.Items)
	slices.Sort(d.Goods.Holders)
	return d
}

// reroot publishes the root of the list as it is.
func (d *drawn) reroot() {
	var tree draw.Tree
	for rest := d.list; len(rest) >= draw.RecordBytes; rest = rest[draw.RecordBytes:] {
		tree.Add(draw.Record(rest).Leaf())
	}
	root := tree.Root()
	d.Root = root[:]
}

func (d *drawn) verify(t testing.TB) draw.Report {
	t.Helper()
	text, err := json.Marshal(d.Bundle)
	require.NoError(t, err)
	b, err := draw.ReadBundle(bytes.NewReader(text))
	require.NoError(t, err, string(text))
	require.Equal(t, &d.Bundle, b)
	report, err := draw.Verify(t.Context(), b, bytes.NewReader(d.list), int64(len(d.list)), d.own)
	require.NoError(t, err)
	return report
}

// scoreOf is the score of the entry at a place.
func (d *drawn) scoreOf(place int64) draw.Score {
	return d.seed.Score(draw.Record(d.list[place*draw.RecordBytes:]).Leaf())
}

// unoffered is the place of an entry that has no offer.
func (d *drawn) unoffered() int64 {
	offered := map[int64]bool{}
	for _, o := range d.Offers {
		offered[o.Place] = true
	}
	place := int64(0)
	for offered[place] {
		place++
	}
	return place
}

func TestVerifyFindsNothingInGenuineDraws(t *testing.T) {
	t.Parallel()
	for _, items := range [][]string{nil, {"m"}, {"s", "m", "l"}} {
		d := newDraw(t, items...)
		root := fmt.Sprintf("%x", []byte(d.Root))
		for _, c := range d.verify(t) {
			require.Equal(t, draw.Kept, c.Verdict, c.Text)
		}
		report := d.verify(t)
		require.Equal(t, draw.Check{Name: "list", Verdict: draw.Kept, Text: "500 entries with the root " + root}, report[0])
		require.Contains(t, report[1].Text, "round 32285085 of drand quicknet is of "+
			d.FrozenAt.Add(time.Second).Format(time.RFC3339))
		d.Offers = d.Offers[:len(d.Offers)/2]
		require.Equal(t, draw.Kept, d.verify(t)[2].Verdict, d.verify(t)[2].Text)
		require.Equal(t, draw.Unknown, d.verify(t)[3].Verdict, "units are left")

		var earlier int64
		place := d.unoffered()
		for other := range d.entries {
			own, theirs := d.scoreOf(place), d.scoreOf(int64(other))
			if d.list[other*draw.RecordBytes] == d.list[place*draw.RecordBytes] && bytes.Compare(theirs[:], own[:]) < 0 {
				earlier++
			}
		}
		d.own = &d.entries[place]
		require.Contains(t, d.verify(t)[4].Text, fmt.Sprintf("at place %d, rank %d of ", place, earlier))
		require.Equal(t, draw.Kept, d.verify(t)[4].Verdict)
	}

	d := newDraw(t)
	for rank, want := range map[int]string{3: "rank 3 of 500; offered", 4: "rank 4 of 500; skipped: already-purchased"} {
		d.own = &d.entries[d.Offers[rank].Place]
		require.Contains(t, d.verify(t)[4].Text, want)
	}
	d.own, d.Offers = &d.entries[d.Offers[3].Place], d.Offers[:3]
	require.Contains(t, d.verify(t)[4].Text, "rank 3 of 500; not offered: the last rank that was is 2")
	d.Offers = d.Offers[:0]
	require.Contains(t, d.verify(t)[4].Text, "rank 3 of 500; no rank was offered yet")

	d.Seed.Kind, d.Seed.Parties, d.Rounds = draw.SeedParties, someParties(3), nil
	require.Contains(t, d.verify(t)[1].Text, "the secrets of 3 parties")
	d.Seed, d.Parties = nil, d.Seed.Parties
	report := d.verify(t)
	require.False(t, report.Has(draw.Broken))
	require.Equal(t, []draw.Verdict{draw.Kept, draw.Unknown, draw.Unknown, draw.Unknown, draw.Kept}, []draw.Verdict{
		report[0].Verdict, report[1].Verdict, report[2].Verdict, report[3].Verdict, report[4].Verdict,
	})

	d.Parties[1].Secret = nil
	d.VoidReason, d.VoidedAt = draw.VoidSilent, d.FrozenAt.Add(time.Hour+time.Second)
	require.Equal(t, "there is none, and the draw is void: "+draw.VoidSilent, d.verify(t)[1].Text)
	require.Equal(t, draw.Unknown, d.verify(t)[1].Verdict)
	d.Parties, d.Rounds, d.VoidReason, d.VoidedAt = nil, []int64{someRound}, draw.VoidEarly, d.FrozenAt
	require.Equal(t, draw.Unknown, d.verify(t)[1].Verdict, d.verify(t)[1].Text)

	d = &drawn{Bundle: d.Bundle}
	d.Entries = 0
	d.reroot()
	require.Equal(t, "0 entries with the root e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
		d.verify(t)[0].Text)
}

// Each promise that is broken has a sentence of its own.
func TestVerifyFindsTampering(t *testing.T) {
	t.Parallel()
	more := func(d *drawn) { // one more entry, in the list and in its size
		r := record(t, someEntry(1_000_000, ""))
		d.list, d.Entries = append(d.list, r[:]...), d.Entries+1
	}
	fewer := func(d *drawn) { d.list, d.Entries = d.list[:len(d.list)-draw.RecordBytes], d.Entries-1 }
	void := func(d *drawn, reason string, at time.Time) {
		d.Seed, d.Offers, d.VoidReason, d.VoidedAt = nil, []draw.Offer{}, reason, at
	}
	drop := func(d *drawn, rank int) { // the offers of the lower ranks move up
		d.Offers = append(d.Offers[:rank], d.Offers[rank+1:]...)
		for i := range d.Offers {
			d.Offers[i].Rank = int64(i)
		}
	}
	for name, c := range map[string]struct {
		change func(*drawn)
		want   string
		items  []string
	}{
		"an entry added after the root":   {more, "list: the root of the file is ", nil},
		"an entry removed after the root": {fewer, "list: the root of the file is ", nil},
		"an entry added to the file only": {
			func(d *drawn) { d.list = append(d.list, d.list[:draw.RecordBytes]...) },
			"list: the file has 16533 bytes, want 16500 for 500 entries", nil,
		},
		"a truncated file": {
			func(d *drawn) { d.list = d.list[:len(d.list)-1] }, "list: the file has 16499 bytes", nil,
		},
		"an empty file":  {func(d *drawn) { d.list = nil }, "list: the file has 0 bytes", nil},
		"a changed root": {func(d *drawn) { d.Root[31] ^= 1 }, "list: the root of the file is ", nil},
		"a short root":   {func(d *drawn) { d.Root = d.Root[:31] }, "list: the root of the file is ", nil},
		"a changed leaf": {func(d *drawn) { d.list[400*draw.RecordBytes+20] ^= 1 }, "list: the root of the file is ", nil},
		"two entries exchanged": {
			func(d *drawn) {
				first, second := d.list[:draw.RecordBytes], d.list[draw.RecordBytes:2*draw.RecordBytes]
				kept := bytes.Clone(first)
				copy(first, second)
				copy(second, kept)
			}, "list: the root of the file is ", nil,
		},
		"an entry of no item": {
			func(d *drawn) { d.list[400*draw.RecordBytes] = 'd'; d.reroot() },
			"list: 1 entries are of no item",
			[]string{"s", "m", "l"},
		},
		"another round than the rule's": {
			func(d *drawn) {
				d.Rounds[0]++
				d.Seed.Round, d.Seed.Signature = someRound+1, unhex(t, beacons[someRound+1].signature)
			}, "seed: the rounds are [32285086] and the seed is of round 32285086, but the rule gives [32285085]", nil,
		},
		"rounds that were not announced": {
			func(d *drawn) { d.Rounds = []int64{someRound - 20, someRound} }, "seed: the rounds are [32285065 32285085]", nil,
		},
		"another round of the seed": {
			func(d *drawn) { d.Seed.Round, d.Seed.Signature = 42, unhex(t, beacons[42].signature) },
			"seed: the rounds are [32285085] and the seed is of round 42, but", nil,
		},
		"the signature of another round": {
			func(d *drawn) { d.Seed.Signature = unhex(t, beacons[42].signature) }, "seed: round 32285085: not the sig", nil,
		},
		"a changed signature": {func(d *drawn) { d.Seed.Signature[40] ^= 1 }, "seed: round 32285085: not the sig", nil},
		"a list that was frozen when the round was known": {
			func(d *drawn) { d.FrozenAt = draw.RoundTime(someRound) },
			"but the rule gives [32285085 32285105]", nil,
		},
		"a list that was frozen after the last round": {
			func(d *drawn) { d.FrozenAt = d.ClosesAt.Add(3 * time.Minute) }, "seed: the list was frozen after the last", nil,
		},
		"a list that was frozen too early": {
			func(d *drawn) { d.FrozenAt = d.ClosesAt.Add(-1) }, "seed: the list was frozen before the entries closed", nil,
		},
		"no freeze":         {func(d *drawn) { d.FreezeSeconds = 0 }, "seed: the freeze has 0 seconds", nil},
		"an endless freeze": {func(d *drawn) { d.FreezeSeconds = 1 << 62 }, "seed: the freeze has 46116860184", nil},
		"a seed by the server alone": {
			func(d *drawn) { d.Seed.Kind = "server" }, `seed: "server" is no kind of seed`, nil,
		},
		"a void draw with a seed": {
			func(d *drawn) { d.VoidReason = draw.VoidEarly }, "the list may have been frozen when the seed was public), " +
				"but it has a seed or offers", nil,
		},
		"a void draw whose list was frozen in time": {
			func(d *drawn) { void(d, draw.VoidLate, d.ClosesAt.Add(time.Hour)) },
			"seed: the draw is void (" + draw.VoidLate + "), but its list was frozen before a round", nil,
		},
		"a void draw for no reason": {
			func(d *drawn) { void(d, "by the operator", d.FrozenAt) }, "seed: the draw is void (by the operator), but no", nil,
		},
		"a void draw whose round was not early": {
			func(d *drawn) { void(d, draw.VoidEarly, draw.RoundTime(someRound)) }, "when its round was to be known", nil,
		},
		"a void draw of drand without a party": {
			func(d *drawn) { void(d, draw.VoidSilent, d.FrozenAt.Add(2*time.Hour)) }, "but a round of drand gives its seed", nil,
		},
		"a void draw of parties without a round": {
			func(d *drawn) {
				void(d, draw.VoidEarly, d.FrozenAt)
				d.Rounds, d.Parties = nil, someParties(2)
			}, "but no round gives its seed", nil,
		},
		"a void draw of nobody": {
			func(d *drawn) {
				void(d, draw.VoidSilent, d.FrozenAt.Add(2*time.Hour))
				d.Rounds = nil
			}, "seed: neither parties nor rounds give it", nil,
		},
		"a void draw before the end of the time for secrets": {
			func(d *drawn) {
				void(d, draw.VoidSilent, d.FrozenAt.Add(time.Hour))
				d.Rounds, d.Parties = nil, someParties(2)
				d.Parties[0].Secret = nil
			}, "and secrets are in time until " + draw.RoundTime(someRound).Add(time.Hour-time.Second).Format(time.RFC3339), nil,
		},
		"a void draw whose parties all revealed": {
			func(d *drawn) {
				void(d, draw.VoidSilent, d.FrozenAt.Add(2*time.Hour))
				d.Rounds, d.Parties = nil, someParties(2)
			}, "but each party has revealed its secret", nil,
		},
		"a skip of an entrant without an order": {
			func(d *drawn) { d.Goods.Holders = d.Goods.Holders[1:] }, "was skipped for an order that its entrant did not", nil,
		},
		"a stock that shrank": {
			func(d *drawn) { d.Stock-- }, "units: it has 15 units, and no change of the stock leads there from 16 units", nil,
		},
		"items exchanged after the freeze, offers as well": {
			func(d *drawn) {
				d.Items[0], d.Items[1] = d.Items[1], d.Items[0]
				for i := range d.Offers {
					d.Offers[i].Item = map[string]string{"s": "m", "m": "s"}[d.Offers[i].Item]
				}
			}, `units: it has 16 units ("m" 8, "s" 8), and no change of the stock leads there from 16 units ("s" 8, "m" 8)`,
			[]string{"s", "m"},
		},
		"items that are not the stock": {
			func(d *drawn) { d.Stock, d.Goods.Stock = 17, 17 }, "which is not their sum", []string{"s", "m"},
		},
		"a change of the stock to other items": {
			func(d *drawn) { d.Restocks = []draw.Restock{{Revision: 4, Stock: 16}} }, "has other items than", []string{"s", "m"},
		},
		"changes of the stock in another order": {
			func(d *drawn) { d.Restocks = []draw.Restock{{Revision: 4, Stock: 9}, {Revision: 3, Stock: 16}} },
			"units: a change of the stock has revision 3, after 4", nil,
		},
		"a change of the stock after the bundle": {
			func(d *drawn) { d.Restocks = []draw.Restock{{Revision: 5, Stock: 16}} }, "and in a bundle of revision 4", nil,
		},
		"offers without a seed": {func(d *drawn) { d.Seed = nil }, "seed: there are offers, but no seed", nil},
		"a missing reveal": {
			func(d *drawn) {
				d.Seed.Kind, d.Seed.Parties = draw.SeedParties, someParties(2)
				d.Seed.Parties[1].Secret = nil
			}, `seed: the parties give no seed: "pp" has not revealed`, nil,
		},
		"two ranks exchanged": {
			func(d *drawn) { d.Offers[2].Place, d.Offers[3].Place = d.Offers[3].Place, d.Offers[2].Place },
			"ranks: rank 3 has place ", nil,
		},
		"a rank left out": {
			func(d *drawn) { d.Offers = append(d.Offers[:7], d.Offers[8:]...) },
			"ranks: rank 8 stands where rank 7 is next", nil,
		},
		"a rank left out, the others moved up": {func(d *drawn) { drop(d, 7) }, "comes before rank 7, and was neither", nil},
		"the first rank left out":              {func(d *drawn) { drop(d, 0) }, "comes before rank 0, and was neither", nil},
		"a rank twice": {
			func(d *drawn) { d.Offers = append(d.Offers, d.Offers[19]) }, "ranks: rank 19 stands where rank 20 is next", nil,
		},
		"an entry twice": {
			func(d *drawn) {
				d.Offers = append(d.Offers, d.Offers[19])
				d.Offers[20].Rank++
			}, "whose score is not above that of the rank before", nil,
		},
		"a winner that is not next": {
			func(d *drawn) { d.Offers[19].Place = d.unoffered() }, "comes before rank 19, and was neither", nil,
		},
		"a winner who never entered": {func(d *drawn) { d.Offers[0].Place = 500 }, "rank 0 is at place 500 of 500", nil},
		"a winner before the list":   {func(d *drawn) { d.Offers[0].Place = -1 }, "rank 0 is at place -1 of 500", nil},
		"a skip without a reason": {
			func(d *drawn) { d.Offers[4].Reason = "" }, `ranks: rank 4 has the outcome "skipped" and the reason ""`, nil,
		},
		"a skip for an unknown reason": {
			func(d *drawn) { d.Offers[4].Reason = "disliked" }, `the outcome "skipped" and the reason "disliked"`, nil,
		},
		"an offer with a reason": {
			func(d *drawn) { d.Offers[0].Reason = draw.SkippedHolder }, `rank 0 has the outcome "offered" and the rea`, nil,
		},
		"an unknown outcome": {func(d *drawn) { d.Offers[0].Outcome = "lost" }, `rank 0 has the outcome "lost"`, nil},
		"an offer of another item": {
			func(d *drawn) {
				last := &d.Offers[len(d.Offers)-1]
				last.Item = map[string]string{"s": "m", "m": "l", "l": "s"}[last.Item]
			}, "stands where rank 10 is next", []string{"s", "m", "l"},
		},
		"an entry of another item": {
			func(d *drawn) { d.Offers[0].Place += 1 - 2*(d.Offers[0].Place%2) }, "whose entry is of another item",
			[]string{"s", "m"},
		},
		"an offer of an unknown item": {
			func(d *drawn) { d.Offers[0].Item = "xl" }, `ranks: rank 0 is of "xl", which is no item`, []string{"s", "m"},
		},
		"an offer without an item": {
			func(d *drawn) { d.Offers[0].Item = "" }, `ranks: rank 0 is of "", which is no item`, []string{"s", "m"},
		},
		"items exchanged": {
			func(d *drawn) { d.Items[0], d.Items[1] = d.Items[1], d.Items[0] }, "whose entry is of another item",
			[]string{"s", "m"},
		},
		"an entry with an offer that is in the list twice": {
			func(d *drawn) {
				copy(d.list[d.unoffered()*draw.RecordBytes:], d.list[d.Offers[0].Place*draw.RecordBytes:][:draw.RecordBytes])
				d.reroot()
			}, "in the list twice", nil,
		},
		"a forged receipt": {
			func(d *drawn) { d.own = &d.entries[7]; d.own.User += "x" }, "receipt: it is not in the list", nil,
		},
		"a receipt that is not in the list": {
			func(d *drawn) { other := someEntry(1_000_000, ""); d.own = &other }, "receipt: it is not in the list", nil,
		},
		"a receipt of two units": {
			func(d *drawn) { d.own = &d.entries[7]; d.own.Quantity = 2 }, "receipt: it is not in the list", nil,
		},
		"a receipt of another sale": {
			func(d *drawn) { d.own = &d.entries[7]; d.EntriesSaleID = uuid.New() }, "receipt: it is of sale " +
				entriesSale.String() + ", not of the entries", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDraw(t, c.items...)
			c.change(d)
			report := d.verify(t)
			require.True(t, report.Has(draw.Broken), report)
			var broken []string
			for _, check := range report {
				if check.Verdict == draw.Broken {
					broken = append(broken, check.Name+": "+check.Text)
				}
			}
			require.Contains(t, strings.Join(broken, "\n"), c.want)
		})
	}
}

func TestUnreadableListIsNoVerdict(t *testing.T) {
	t.Parallel()
	d := newDraw(t)
	for _, offers := range []int{0, 20} {
		d.Offers = d.Offers[:offers]
		_, err := draw.Verify(t.Context(), &d.Bundle, bytes.NewReader(d.list[:100]), int64(len(d.list)), nil)
		require.Error(t, err, "the file became shorter")
	}
}

// endless is a text without an end: a beginning, and the same again and again.
func endless(beginning, again string) io.Reader {
	return io.MultiReader(strings.NewReader(beginning), io.LimitReader(repeated(again), 100<<20))
}

type repeated string

func (r repeated) Read(p []byte) (n int, err error) {
	for n+len(r) <= len(p) {
		n += copy(p[n:], r)
	}
	if n == 0 {
		n = copy(p, r)
	}
	return n, nil
}

func TestOtherBundlesAreRefusedInBoundedMemory(t *testing.T) {
	good, err := json.Marshal(newDraw(t, "s", "m").Bundle)
	require.NoError(t, err)
	with := func(member, value string) io.Reader {
		return strings.NewReader(strings.Replace(string(good), `"`+member+`":`, `"`+member+`":`+value+`,"x":`, 1))
	}
	for _, c := range []struct {
		from io.Reader
		want string
	}{
		{strings.NewReader(""), "EOF"},
		{strings.NewReader("<html>"), "invalid character"},
		{strings.NewReader("[]"), "JSON array into Go"},
		{strings.NewReader("{}"), "version is 0, want 1 to 2"},
		{strings.NewReader(`{"version":3}`), "version is 3, want 1 to 2"},
		{io.MultiReader(bytes.NewReader(good), strings.NewReader("{}")), "after top-level value"},
		{bytes.NewReader(good[:len(good)-1]), "unexpected EOF"},
		{with("entries", "500"), "unknown object member name"},
		{strings.NewReader(strings.Replace(string(good), "{", `{"offers":[],`, 1)), "duplicate object member name"},
		{strings.NewReader(`{"version":1,"entries":1000000000}`), "it has 1000000000 entries"},
		{strings.NewReader(`{"version":1,"entries":-1}`), fmt.Sprintf("it has -1 entries, want 0 to %d", draw.MaxEntries)},
		{strings.NewReader(`{"version":1,"entries":99999999999999999999}`), "value out of range"},
		{strings.NewReader(strings.Replace(string(good), `"code":"m"`, `"code":"s"`, 1)), `item "s"`},
		{strings.NewReader(strings.Replace(string(good), `"code":"m"`, `"code":"M"`, 1)), `item "M"`},
		{strings.NewReader(`{"root":"xyz"}`), "invalid byte"},
		{strings.NewReader(`{"offers":null}`), "want a list"},
		{endless(`{"offers":[{}`, `,{}`), "more than 1000000 members"},
		{endless(`{"seed":{"parties":[{}`, `,{}`), "more than 16 members"},
		{endless(`{"items":[{}`, `,{}`), "more than 52 members"},
		{endless(`{"rounds":[1`, `,1`), "more than 3 members"},
		{endless(`{"goods":{"holders":[1`, `,1`), "more than 1000000 members"},
		{endless(`{"restocks":[{}`, `,{}`), "more than 100000 members"},
		{strings.NewReader(strings.Replace(string(good), `"goods"`, `"x"`, 1)), "unknown object member name"},
		{strings.NewReader(`{"version":2}`), "it has no goods"},
		{endless(`{"root":"`, "00"), "longer than 67108864 bytes"},
		{endless(`{"offers":[{"place":`, "1"), "longer than 67108864 bytes"},
		{endless("", " "), "longer than 67108864 bytes"},
		{endless(`{"seed":`, "["), "JSON array into Go"},
		{endless(`{"offers":`, "["), "JSON array into Go"},
		{endless("{", `"x":`), "unknown object member name"},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := draw.ReadBundle(c.from)
		runtime.ReadMemStats(&after)
		require.ErrorIs(t, err, draw.ErrBundle, c.want)
		require.ErrorContains(t, err, c.want)
		t.Logf("%4d MB: %.140s", (after.TotalAlloc-before.TotalAlloc)>>20, err)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(512<<20), c.want)
	}
	failing := errors.New("the disk fails")
	_, err = draw.ReadBundle(iotest.ErrReader(failing))
	require.ErrorIs(t, err, failing)
	require.NotErrorIs(t, err, draw.ErrBundle)
}
