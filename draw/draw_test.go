package draw_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/tlog"

	"stampede/draw"
	"stampede/reservation/order"
)

// stored are the nodes of a tree, as package tlog wants them.
type stored []tlog.Hash

func (s stored) ReadHashes(indexes []int64) (hashes []tlog.Hash, err error) {
	for _, i := range indexes {
		hashes = append(hashes, s[i])
	}
	return hashes, nil
}

func (s *stored) add(t *testing.T, n int64, leaf tlog.Hash) {
	t.Helper()
	added, err := tlog.StoredHashesForRecordHash(n, leaf, *s)
	require.NoError(t, err)
	*s = append(*s, added...)
}

// someLeaf is a leaf that differs for each place.
func someLeaf(place int64) tlog.Hash {
	return sha256.Sum256(binary.BigEndian.AppendUint64(nil, uint64(place)))
}

func TestRootIsThatOfRFC6962(t *testing.T) {
	t.Parallel()
	var tree draw.Tree
	var nodes stored
	sizes := map[int64]bool{}
	for range 20 {
		sizes[rand.Int64N(100_000)] = true
	}
	for size := range int64(100_000) {
		if size <= 2_100 || sizes[size] {
			want, err := tlog.TreeHash(size, nodes)
			require.NoError(t, err)
			require.Equal(t, want, tree.Root(), "of %d leaves", size)
		}
		tree.Add(someLeaf(size))
		nodes.add(t, size, someLeaf(size))
	}
}

func TestProofFromChunksIsThatOfTheTree(t *testing.T) {
	t.Parallel()
	for _, size := range []int64{
		1, 2, 3, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 5121, 1 + rand.Int64N(20_000),
	} {
		var nodes stored
		var leaves, chunks []draw.Hash
		for place := range size {
			nodes.add(t, place, someLeaf(place))
			leaves = append(leaves, someLeaf(place))
		}
		chunk := func(n int64) []draw.Hash {
			return leaves[n*draw.ChunkLeaves : min((n+1)*draw.ChunkLeaves, size)]
		}
		for n := range (size + draw.ChunkLeaves - 1) / draw.ChunkLeaves {
			chunks = append(chunks, draw.RootOf(chunk(n)))
		}
		root := draw.RootOf(chunks)
		require.Equal(t, draw.RootOf(leaves), root, "of the roots of %d leaves", size)
		for _, place := range []int64{0, size / 2, size - 1, rand.Int64N(size), rand.Int64N(size)} {
			proof, err := draw.Prove(chunks, chunk(place/draw.ChunkLeaves), place)
			require.NoError(t, err)
			want, err := tlog.ProveRecord(size, place, nodes)
			require.NoError(t, err)
			require.Equal(t, want, proof, "place %d of %d", place, size)
			require.NoError(t, tlog.CheckRecord(proof, size, root, place, leaves[place]))
			require.Error(t, tlog.CheckRecord(proof, size, root, place, someLeaf(-1)))
		}
		for _, place := range []int64{-1, size, size + draw.ChunkLeaves, 1 << 62} {
			_, err := draw.Prove(chunks, chunk(0), place)
			require.Error(t, err, "place %d of %d", place, size)
		}
		changed := append([]draw.Hash{someLeaf(-1)}, chunk(0)[1:]...)
		_, err := draw.Prove(chunks, changed, 0)
		require.ErrorContains(t, err, "are not chunk 0")
	}
}

// someEntry is an entry that differs for each number.
func someEntry(n int64, lines order.Lines) order.Receipt {
	leaf := someLeaf(n)
	id := uuid.UUID(leaf[:16])
	return order.Receipt{
		OrderID: id, SaleID: entriesSale, User: "user-" + id.String()[:8], Epoch: 1, Sequence: n + 1, Quantity: 1,
		Lines: lines, ReservedAt: time.UnixMilli(1_795_000_000_000 + n).UTC(),
	}
}

var entriesSale = uuid.MustParse("01a1fd78-7a47-79f0-861a-d13e99809a15")

func record(t testing.TB, entry order.Receipt) draw.Record {
	t.Helper()
	r, err := draw.NewRecord(entry)
	require.NoError(t, err)
	return r
}

func TestRecordIsThatOfTheReceiptUnderAnySecret(t *testing.T) {
	t.Parallel()
	for _, lines := range []order.Lines{"", "c1"} {
		entry := someEntry(7, lines)
		for _, secret := range []string{"s", "t"} {
			signer, err := order.NewSigner([]byte(strings.Repeat(secret, order.MinReceiptSecretBytes)))
			require.NoError(t, err)
			read, err := order.ParseReceipt(string(signer.Sign(nil, entry)))
			require.NoError(t, err)
			require.Equal(t, entry, read)
			require.Equal(t, record(t, entry), record(t, read))
		}
		other := entry
		other.OrderID[15]++
		require.NotEqual(t, record(t, entry), record(t, other))
		r := record(t, entry)
		require.Equal(t, tlog.RecordHash(r[:]), r.Leaf())
		require.Equal(t, (lines + "\x00")[0], r[0])
	}
}

func TestEntryIsOneUnit(t *testing.T) {
	t.Parallel()
	for lines, units := range map[order.Lines]int64{"": 2, "a2": 2, "a2c1": 3, "a1c1": 1, "a2c": 1, "1": 1, "%1": 1} {
		entry := someEntry(1, lines)
		entry.Quantity = units
		_, err := draw.NewRecord(entry)
		require.ErrorIs(t, err, draw.ErrNoEntry, lines)
	}
}

// The test vectors of the page are what the package computes.
func TestFormatHasVectors(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/draws-format.md")
	require.NoError(t, err)
	var tree draw.Tree
	var leaves []draw.Hash
	var list []byte
	for place, name := range []string{"ann", "bob", "eve"} {
		sum := sha256.Sum256([]byte(name))
		list = append(append(list, 0), sum[:]...)
		leaf := draw.Record(list[place*draw.RecordBytes:]).Leaf()
		tree.Add(leaf)
		leaves = append(leaves, leaf)
		require.Contains(t, string(page), fmt.Sprintf("leaf %d     %x\n", place, leaf[:]))
	}
	root := tree.Root()
	require.Contains(t, string(page), fmt.Sprintf("root       %x\n", root[:]))
	var parties []draw.Party
	for n := range 2 {
		secret := bytes.Repeat([]byte{byte(n + 1)}, 32)
		sum := sha256.Sum256(secret)
		parties = append(parties, draw.Party{Name: fmt.Sprint(n), Commitment: sum[:], Secret: secret})
	}
	goods := uuid.MustParse("01a2027b-de9c-7adf-b6e6-5b263e1fb250")
	var seed draw.Seed
	for version := draw.FirstVersion; version <= draw.Version; version++ {
		seed, err = draw.PartiesSeed(version, goods, root[:], parties)
		require.NoError(t, err)
		require.Contains(t, string(page), fmt.Sprintf("version %d  %x\n", version, seed[:]))
	}
	lowest := draw.NewLowest(3, draw.Score{})
	for place, leaf := range leaves {
		score := seed.Score(leaf)
		lowest.Add(int64(place), score)
		require.Contains(t, string(page), fmt.Sprintf("score %d    %x\n", place, score[:]))
	}
	ranks := lowest.Ranks()
	require.Contains(t, string(page), fmt.Sprintf("places %d, %d, %d\n", ranks[0].Place, ranks[1].Place, ranks[2].Place))

	_, text, _ := strings.Cut(string(page), "```json\n")
	text, _, _ = strings.Cut(text, "```")
	verdicts := func(from, to string) string {
		require.Contains(t, text, from)
		b, err := draw.ReadBundle(strings.NewReader(strings.Replace(text, from, to, 1)))
		require.NoError(t, err)
		report, err := draw.Verify(t.Context(), b, bytes.NewReader(list), int64(len(list)), nil)
		require.NoError(t, err)
		found := ""
		for _, check := range report {
			found += fmt.Sprintf("%s %s, ", check.Name, check.Verdict)
		}
		return found
	}
	require.Equal(t, "list kept, seed kept, ranks kept, units kept, ", verdicts("{", "{"))
	require.Contains(t, verdicts(`, "holders": [2]`, ""), "ranks broken")
	require.Contains(t, verdicts(`"stock": 4, "offers"`, `"stock": 5, "offers"`), "units broken")
	last := `,
  {"rank": 2, "place": 0, "outcome": "offered"}`
	require.Contains(t, verdicts(last, ""), "ranks kept, units unknown")
}

// A bundle that was replaced as a whole is found by what somebody kept of the draw from before its seed.
func TestBundleIsComparedWithWitness(t *testing.T) {
	t.Parallel()
	d := newDraw(t)
	kept := draw.Frozen{
		Version: draw.Version,
		SaleID:  d.SaleID, EntriesSaleID: d.EntriesSaleID, Entries: d.Entries, Root: d.Root, FrozenAt: d.FrozenAt,
		Rounds: d.Rounds, ClosesAt: d.ClosesAt, FreezeSeconds: d.FreezeSeconds, Goods: d.Goods,
	}
	data, err := json.Marshal(kept)
	require.NoError(t, err)
	event := fmt.Sprintf(`{"specversion": "1.0", "type": "stampede.draw.frozen", "data": %s}`, data)
	view, err := json.Marshal(draw.View{
		Version: draw.Version,
		SaleID:  d.SaleID, EntriesSaleID: d.EntriesSaleID, State: "frozen", Entries: &d.Entries, Root: d.Root,
		Rounds: d.Rounds, FrozenAt: "2020-01-01T00:00:00.123Z", ClosesAt: "2020-01-01T00:00:00.123Z",
		Goods: d.Goods,
	})
	require.NoError(t, err)
	for _, text := range []string{event, string(data)} {
		parsed, err := draw.ParseWitness([]byte(text))
		require.NoError(t, err)
		require.Equal(t, []*draw.Frozen{&kept}, parsed.Frozen)
	}
	witness := &draw.Witness{Frozen: []*draw.Frozen{&kept}}
	require.Equal(t, draw.Kept, d.Compare(witness)[0].Verdict, d.Compare(witness)[0].Text)
	require.Equal(t, draw.Unchecked, d.Compare(nil)[0].Verdict)

	for name, c := range map[string]struct {
		change func(*drawn)
		want   string
	}{
		"another list": {func(d *drawn) { d.list[20] ^= 1; d.reroot() }, "it was the root "},
		"more entries": {func(d *drawn) { d.Entries++ }, "it was 500 entries, and not 501 entries"},
		"another end": {
			func(d *drawn) { d.ClosesAt = d.ClosesAt.Add(time.Second) },
			"it was the end of the entries at ",
		},
		"another freeze": {func(d *drawn) { d.FreezeSeconds-- }, "it was a freeze of 60 seconds, and not a "},
		"another time":   {func(d *drawn) { d.FrozenAt = d.FrozenAt.Add(-time.Second) }, "it was a list that was frozen at "},
		"other rounds":   {func(d *drawn) { d.Rounds = []int64{42} }, "it was the rounds [32285085], and not the "},
		"parties": {
			func(d *drawn) { d.Seed, d.Rounds = &draw.Source{Kind: draw.SeedParties, Parties: someParties(1)}, nil },
			"it was the parties [], and not the parties [\"p\" with ",
		},
		"parties of a void draw": {
			func(d *drawn) { d.Seed, d.Parties = nil, someParties(1) }, "it was the parties [], and not the parties [\"p\"",
		},
		"fewer units": {
			func(d *drawn) { d.Goods = &draw.Goods{Revision: 2, Stock: 9} }, "it was at revision 2 16 units, of which [0] were",
		},
		"more holders": {
			func(d *drawn) { d.Goods = &draw.Goods{Revision: 2, Stock: 16, Holders: []draw.Place{1, 2}} },
			"and not at revision 2 16 units, of which [0] were sold to entrants at the places [1 2]",
		},
		"an older seed": {
			func(d *drawn) { d.Version = draw.FirstVersion }, "it was a draw of version 2, and not a draw of version 1",
		},
		"another draw":  {func(d *drawn) { d.SaleID = uuid.New() }, "it was the sale "},
		"other entries": {func(d *drawn) { d.EntriesSaleID = uuid.New() }, "it was the entries of sale "},
	} {
		other := *d
		other.list = bytes.Clone(d.list)
		c.change(&other)
		require.Equal(t, draw.Broken, other.Compare(witness)[0].Verdict, name)
		require.Contains(t, other.Compare(witness)[0].Text, c.want, name)
	}
	for text, want := range map[string]string{
		"": "it has no root", "[]": "array", "{": "unexpected EOF",
		`{"type":"stampede.draw.created","data":{"freeze_seconds":60}}`: "it has no root",
		`{"root":"00","state":"freezing"}`:                              "it has no time yet",
		strings.Replace(string(view), "{", `{"seed":"00",`, 1):          "it has the seed",
		strings.Replace(string(data), `"goods"`, `"x"`, 1):              "it has no goods",
	} {
		_, err := draw.ParseWitness([]byte(text))
		require.ErrorIs(t, err, draw.ErrFrozen)
		require.ErrorContains(t, err, want)
	}
	parsed, err := draw.ParseWitness(view)
	require.NoError(t, err)
	require.Contains(t, parsed.Frozen[0].Difference(&kept), "the end of the entries at 2020-01-01T00:00:00.123Z, and not")
}

// A witness who keeps later events finds what is hidden of them. An event after the bundle decides nothing.
func TestBundleIsComparedWithLaterEvents(t *testing.T) {
	t.Parallel()
	d := newDraw(t)
	frozen, err := json.Marshal(draw.Frozen{
		Version: draw.Version, SaleID: d.SaleID, EntriesSaleID: d.EntriesSaleID, Entries: d.Entries, Root: d.Root,
		FrozenAt: d.FrozenAt, Rounds: d.Rounds, ClosesAt: d.ClosesAt, FreezeSeconds: d.FreezeSeconds, Goods: d.Goods,
	})
	require.NoError(t, err)
	at := time.Date(2026, 11, 22, 18, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		event  string // of the sale, with this type and data
		change func(*drawn)
		want   draw.Verdict
		text   string
	}{
		"a restock that is told": {
			`sale.restocked","data":{"revision":4,"stock":18`,
			func(d *drawn) { d.Stock, d.Restocks = 18, []draw.Restock{{Revision: 4, At: at, Stock: 18}} }, draw.Kept, "",
		},
		"a restock that is hidden": {
			`sale.restocked","data":{"revision":4,"stock":18`, func(*drawn) {}, draw.Broken,
			"it has a change of the stock to 18 units at revision 4, and the bundle does not",
		},
		"another restock": {
			`sale.restocked","data":{"revision":4,"stock":18`,
			func(d *drawn) { d.Stock, d.Restocks = 17, []draw.Restock{{Revision: 4, Stock: 17}} }, draw.Broken, "to 18 units",
		},
		"a restock before the freeze": {`sale.restocked","data":{"revision":2,"stock":16`, func(*drawn) {}, draw.Kept, ""},
		"a restock after the bundle": {
			`sale.restocked","data":{"revision":5,"stock":18`, func(*drawn) {}, draw.Unknown, "which is after the bundle: get a",
		},
		"a seed": {`draw.seeded","data":{"revision":4,"seed":"00"`, func(*drawn) {}, draw.Kept, ""},
		"a lost seed": {
			`draw.seeded","data":{"revision":4,"seed":"00"`, func(d *drawn) { d.Seed = nil }, draw.Broken, "it has a seed at",
		},
		"another end": {
			`draw.voided","data":{"revision":4,"reason":"late"`, func(*drawn) {}, draw.Broken, "the draw is void (late) at",
		},
		"an event of no interest": {`sale.paused","data":{"revision":4`, func(*drawn) {}, draw.Kept, ""},
	} {
		other := *d
		c.change(&other)
		witness := func(sale uuid.UUID) *draw.Witness {
			kept, err := draw.ParseWitness(fmt.Appendf(nil,
				`{"type":"stampede.draw.frozen","data":%s} {"type":"stampede.%s,"sale_id":%q}}`, frozen, c.event, sale))
			require.NoError(t, err)
			return kept
		}
		found := other.Compare(witness(d.SaleID))[0]
		require.Equal(t, c.want, found.Verdict, name)
		require.Contains(t, found.Text, c.text, name)
		require.Equal(t, draw.Kept, other.Compare(witness(uuid.New()))[0].Verdict, "an event of another sale")
	}
}

// What no file proves is named, and only what the draw has.
func TestReportNamesWhatIsTakenOnTrust(t *testing.T) {
	t.Parallel()
	names := func(d *drawn, w *draw.Witness) string {
		_, names, _ := strings.Cut(append(d.verify(t), d.Compare(w)...).Summary(), "Taken on trust: ")
		return names
	}
	d := newDraw(t)
	require.Equal(t, "witness, entries, orders, cancelled, holders.", names(d, nil))
	d.Restocks = []draw.Restock{{Revision: 4, Stock: 15}, {Revision: 5, Stock: 16}}
	d.Revision = 5
	require.Equal(t, "entries, witness, orders, cancelled, holders, restocks.", names(d, &draw.Witness{}))
	require.Contains(t, fmt.Sprint(d.Compare(nil)), "2 times, the last time to 16 units at 0001-")
	d = newDraw(t)
	d.Version, d.Goods, d.Revision = draw.FirstVersion, nil, 0
	require.Equal(t, "All that the files can prove was kept. Taken on trust: witness, entries, orders, cancelled, stock, "+
		"holders.", append(d.verify(t), d.Compare(nil)...).Summary())
	d.Offers = d.Offers[:1]
	require.Contains(t, append(d.verify(t), d.Compare(nil)...).Summary(), "Not decided: units. Taken on trust: ")
	d.Offers, d.Seed, d.VoidReason = d.Offers[:0], nil, "late"
	require.Equal(t, "Broken: seed. Taken on trust: witness, entries, void, stock.",
		append(d.verify(t), d.Compare(nil)...).Summary())
}

// The verifier in Python knows the format from its page alone, and comes to the same verdicts.
func TestPythonVerifierAgrees(t *testing.T) {
	t.Parallel()
	const script = "../clients/python/verify_draw.py"
	_, err := os.ReadFile(script) // another script is another test, for the cache of go test
	require.NoError(t, err)
	byParties := func(d *drawn, version int) {
		d.Version, d.Rounds, d.Offers = version, nil, []draw.Offer{}
		if version == draw.FirstVersion {
			d.Goods, d.Revision = nil, 0
		}
		d.Seed = &draw.Source{Kind: draw.SeedParties, Parties: someParties(3)}
		seed, err := draw.PartiesSeed(version, d.SaleID, d.Root, d.Seed.Parties)
		require.NoError(t, err)
		lowest := draw.NewLowest(16, draw.Score{})
		for place := range d.Entries {
			lowest.Add(place, seed.Score(draw.Record(d.list[place*draw.RecordBytes:]).Leaf()))
		}
		for rank, r := range lowest.Ranks() {
			d.Offers = append(d.Offers, draw.Offer{Rank: int64(rank), Place: r.Place, Outcome: draw.Offered})
		}
	}
	void := func(d *drawn, reason string, at time.Time) {
		d.Seed, d.Offers, d.VoidReason, d.VoidedAt = nil, []draw.Offer{}, reason, at
	}
	silent := func(d *drawn, after time.Duration) {
		void(d, draw.VoidSilent, d.FrozenAt.Add(after))
		d.Rounds, d.Parties = nil, someParties(2)
		d.Parties[1].Secret = nil
	}
	restock := func(d *drawn, stocks ...int64) {
		for n, stock := range stocks {
			d.Restocks = append(d.Restocks, draw.Restock{Revision: int64(n + 3), Stock: stock})
			d.Stock, d.Revision = stock, int64(n+3)
		}
	}
	for name, c := range map[string]struct {
		items  []string
		change func(*drawn)
		broken bool
	}{
		"a draw":               {nil, func(*drawn) {}, false},
		"a draw with items":    {[]string{"s", "m", "l"}, func(*drawn) {}, false},
		"parties of version 1": {nil, func(d *drawn) { byParties(d, draw.FirstVersion) }, false},
		"parties of version 2": {nil, func(d *drawn) { byParties(d, draw.Version) }, false},
		"another version":      {nil, func(d *drawn) { byParties(d, draw.Version); d.Version = draw.FirstVersion }, true},
		"a secret is missing": {nil, func(d *drawn) {
			byParties(d, draw.Version)
			d.Seed.Parties[1].Secret = nil
		}, true},
		"another root":         {nil, func(d *drawn) { d.Root[31] ^= 1 }, true},
		"a changed leaf":       {nil, func(d *drawn) { d.list[400*draw.RecordBytes+20] ^= 1 }, true},
		"a shorter list":       {nil, func(d *drawn) { d.list = d.list[:len(d.list)-draw.RecordBytes] }, true},
		"another signature":    {nil, func(d *drawn) { d.Seed.Signature[40] ^= 1 }, true},
		"another round":        {nil, func(d *drawn) { d.Seed.Round++ }, true},
		"frozen too late":      {nil, func(d *drawn) { d.FrozenAt = d.ClosesAt.Add(3 * time.Minute) }, true},
		"a rank is left out":   {nil, func(d *drawn) { d.Offers = append(d.Offers[:7], d.Offers[8:]...) }, true},
		"a winner is not next": {nil, func(d *drawn) { d.Offers[19].Place = d.unoffered() }, true},
		"an unknown reason":    {nil, func(d *drawn) { d.Offers[4].Reason = "disliked" }, true},
		"items are exchanged": {[]string{"s", "m"}, func(d *drawn) {
			d.Items[0], d.Items[1] = d.Items[1], d.Items[0]
		}, true},
		"offers without a seed": {nil, func(d *drawn) { d.Seed = nil }, true},
		"no seed yet":           {nil, func(d *drawn) { d.Seed, d.Offers = nil, []draw.Offer{} }, false},
		"nobody gives a seed":   {nil, func(d *drawn) { d.Seed, d.Offers, d.Rounds = nil, []draw.Offer{}, nil }, true},
		"units are withheld":    {nil, func(d *drawn) { d.Offers = d.Offers[:3] }, false},
		"an item is withheld":   {[]string{"s", "m"}, func(d *drawn) { d.Offers = d.Offers[:10] }, false},
		"sold before":           {nil, func(d *drawn) { d.Goods.Sold, d.Offers = 4, d.Offers[:15] }, false},
		"an item sold before": {[]string{"s"}, func(d *drawn) {
			d.Goods.Items[0].Sold, d.Offers = 4, d.Offers[:5]
		}, false},
		"a skip without an order": {nil, func(d *drawn) { d.Goods.Holders = d.Goods.Holders[1:] }, true},
		"a skip by version 1": {nil, func(d *drawn) {
			d.Version, d.Goods, d.Revision = draw.FirstVersion, nil, 0
		}, false},
		"a stock that shrank":      {nil, func(d *drawn) { d.Stock = 9 }, true},
		"a stock that was changed": {nil, func(d *drawn) { restock(d, 9, 12) }, false},
		"a hidden change":          {nil, func(d *drawn) { restock(d, 9, 12); d.Stock = 16 }, true},
		"a change after":           {nil, func(d *drawn) { restock(d, 9); d.Revision = 2 }, true},
		"changes out of order":     {nil, func(d *drawn) { restock(d, 9, 12); d.Restocks[0].Revision = 4 }, true},
		"swapped items and offers": {[]string{"s", "m"}, func(d *drawn) {
			d.Items[0], d.Items[1] = d.Items[1], d.Items[0]
			for i := range d.Offers {
				d.Offers[i].Item = map[string]string{"s": "m", "m": "s"}[d.Offers[i].Item]
			}
		}, true},
		"items are not the stock": {[]string{"s", "m"}, func(d *drawn) { d.Stock, d.Goods.Stock = 17, 17 }, true},
		"a silent party":          {nil, func(d *drawn) { silent(d, time.Hour+1) }, false},
		"a silent party in time":  {nil, func(d *drawn) { silent(d, time.Hour) }, true},
		"no silent party":         {nil, func(d *drawn) { silent(d, time.Hour+1); d.Parties = someParties(2) }, true},
		"a round that was early":  {nil, func(d *drawn) { void(d, draw.VoidEarly, d.FrozenAt) }, false},
		"a round in time":         {nil, func(d *drawn) { void(d, draw.VoidEarly, d.FrozenAt.Add(time.Second)) }, true},
		"an early party":          {nil, func(d *drawn) { silent(d, 0); d.VoidReason = draw.VoidEarly }, true},
		"void by a list in time":  {nil, func(d *drawn) { void(d, draw.VoidLate, d.FrozenAt.Add(time.Hour)) }, true},
		"void for no reason":      {nil, func(d *drawn) { void(d, "by the operator", d.FrozenAt) }, true},
		"void with offers":        {nil, func(d *drawn) { d.VoidReason = draw.VoidEarly }, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDraw(t, c.items...)
			folder := t.TempDir()
			write := func(name string, data []byte) string {
				path := filepath.Join(folder, name)
				require.NoError(t, os.WriteFile(path, data, 0o600))
				return path
			}
			beacon, err := json.Marshal(map[string]any{"round": someRound, "signature": beacons[someRound].signature})
			require.NoError(t, err)
			c.change(d)
			report := d.verify(t)
			require.Equal(t, c.broken, report.Has(draw.Broken), report)
			bundle, err := json.Marshal(d.Bundle)
			require.NoError(t, err)
			python := exec.CommandContext(t.Context(), "python3", script, write("bundle", bundle),
				write("leaves", d.list), write("beacon", beacon))
			out, _ := python.CombinedOutput() // its exit status says which error
			switch says := string(out); {
			case c.broken:
				require.Contains(t, says, "BROKEN: ")
				require.Equal(t, 1, python.ProcessState.ExitCode(), says)
			case report.Has(draw.Unknown):
				require.Equal(t, 3, python.ProcessState.ExitCode(), says)
			default:
				require.Equal(t, 0, python.ProcessState.ExitCode(), says)
			}
		})
	}
}
