package draw_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
)

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
