package draw_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/draw"
)

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
