package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/reservation/order"
)

// drawFiles writes the files of a draw with 50 entries and 5 offers, and returns the receipt of its first rank.
func drawFiles(t *testing.T, folder string) (receipt string) {
	t.Helper()
	const round = 32285085 // of drand quicknet, with its signature
	signature, err := hex.DecodeString("81dbce51d584d90d618547f4b50391d53ace6f6b9aeb8fb67e1879427af9d031" +
		"0ac0ec6f519271d9a313ee84b378d416")
	require.NoError(t, err)
	seed, err := draw.BeaconSeed(round, signature)
	require.NoError(t, err)
	signer, err := order.NewSigner([]byte(strings.Repeat("s", order.MinReceiptSecretBytes)))
	require.NoError(t, err)
	b := draw.Bundle{
		Version: draw.Version,
		SaleID:  uuid.New(), EntriesSaleID: uuid.New(), Entries: 50, Stock: 5,
		ClosesAt: draw.RoundTime(round).Add(-time.Minute), FrozenAt: draw.RoundTime(round).Add(-time.Second),
		FreezeSeconds: 60, Rounds: []int64{round},
		Seed:     &draw.Source{Kind: draw.SeedDrand, Round: round, Signature: signature},
		Revision: 4, Goods: &draw.Goods{Revision: 2, Stock: 5},
	}
	var leaves []byte
	var receipts []string
	var tree draw.Tree
	lowest := draw.NewLowest(5, draw.Score{})
	for place := range b.Entries {
		entry := order.Receipt{
			OrderID: uuid.New(), SaleID: b.EntriesSaleID, User: "ada", Sequence: place, Quantity: 1, ReservedAt: time.Now(),
		}
		record, err := draw.NewRecord(entry)
		require.NoError(t, err)
		leaves, receipts = append(leaves, record[:]...), append(receipts, string(signer.Sign(nil, entry)))
		tree.Add(record.Leaf())
		lowest.Add(place, seed.Score(record.Leaf()))
	}
	root := tree.Root()
	b.Root = root[:]
	for rank, r := range lowest.Ranks() {
		b.Offers = append(b.Offers, draw.Offer{Rank: int64(rank), Place: r.Place, Outcome: draw.Offered})
	}
	text, err := json.Marshal(b)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "bundle"), text, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "leaves"), leaves, 0o600))
	changed := bytes.Replace(text, []byte(`"rank":4`), []byte(`"rank":5`), 1)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "changed"), changed, 0o600))
	offers := b.Offers
	b.Offers = offers[:1]
	withheld, err := json.Marshal(b)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "withheld"), withheld, 0o600))
	b.Offers = offers
	frozen, err := json.Marshal(draw.Frozen{
		Version: b.Version,
		SaleID:  b.SaleID, EntriesSaleID: b.EntriesSaleID, Entries: b.Entries, Root: b.Root, FrozenAt: b.FrozenAt,
		Rounds: b.Rounds, ClosesAt: b.ClosesAt, FreezeSeconds: b.FreezeSeconds, Goods: b.Goods,
	})
	require.NoError(t, err)
	for name, root := range map[string]string{"event": "", "another": "00"} {
		data := bytes.Replace(frozen, []byte(`"root":"`), []byte(`"root":"`+root), 1)
		event := fmt.Sprintf(`{"specversion":"1.0","type":"stampede.draw.frozen","data":%s}`, data)
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(event), 0o600))
		event += fmt.Sprintf(`{"type":"stampede.sale.restocked","data":{"sale_id":%q,"revision":4,"stock":7}}`, b.SaleID)
		require.NoError(t, os.WriteFile(filepath.Join(folder, name+"-restocked"), []byte(event), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(folder, "long"), make([]byte, witnessMax+1), 0o600))
	early, _, _ := bytes.Cut(text, []byte(`"seed":`))
	early = append(early, `"rounds":[32285085],"stock":5,"offers":[],"revision":4,"goods":{"revision":2,"stock":5}}`...)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "early"), early, 0o600))
	return receipts[b.Offers[0].Place]
}

func TestDrawVerifyExitStatuses(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	receipt := drawFiles(t, folder)
	forged := []byte(receipt)
	if forged[10]++; !strings.Contains("BCDEFGHIJKLMNOPQRSTUVWXYZ", string(forged[10])) {
		forged[10] = 'A'
	}
	const files = "--bundle=DIR/bundle --leaves=DIR/leaves"
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{files, exitOK, `list +kept +50 entries with the root \w{64}
seed +kept +the list was frozen at \S+, round 32285085 of drand quicknet is of \S+, and its signature is valid
ranks +kept +5 offered and 0 skipped for a reason: the lowest, without a gap
units +kept +5 units: each was offered, or no entrant is left for it
witness +UNCHECKED +root, times, parties and units may be newer than the seed: compare .*
entries +taken on trust +that none was kept out of the list, .*
orders +taken on trust +that 5 offers were orders .*
All that the files can prove was kept. Taken on trust: witness, entries, orders.
$`},
		{files + " --frozen=DIR/event", exitOK, `witness +kept +root, times, parties and units are those that were`},
		{files + " --frozen=DIR/event-restocked", exitFailed, `witness +BROKEN +it has a change of the stock to 7 un`},
		{files + " --frozen=DIR/long", exitUnknown, `^stampede: the draw was not checked: /.*/long is longer than`},
		{"--bundle=DIR/withheld --leaves=DIR/leaves", exitUnknown, `units +UNKNOWN +of 5 units, 4 were not offered, and (?s:.*)
Not decided: units. Taken on trust: witness, entries, orders.
`},
		{files + " --frozen=DIR/another", exitFailed, `witness +BROKEN +before the seed existed, it was the root 00`},
		{files + " --frozen=DIR/bundle", exitUnknown, `^stampede: the draw was not checked: not what was published of a fr`},
		{files + " --frozen=DIR/none", exitUnknown, `^stampede: the draw was not checked: open /.*/none: no such`},
		{files + " --output=json", exitOK, `^\[{"name":"list","verdict":"kept","text":"50 entries.*"name":"orders","verdict":"trusted"`},
		{files + " --receipt=" + receipt, exitOK, `receipt +kept +.* place \d+, rank 0 of 50; offered`},
		{files + " --receipt=" + string(forged), exitFailed, `receipt +BROKEN +it is `},
		{files + " --receipt=xyz", exitUsage, `^stampede: --receipt: the receipt is not valid`},
		{"--bundle=DIR/changed --leaves=DIR/leaves", exitFailed, `ranks +BROKEN +rank 5 stands where rank 4 is next`},
		{"--bundle=DIR/changed --leaves=DIR/leaves --output=json", exitFailed, `"verdict":"broken"`},
		{"--bundle=DIR/bundle --leaves=DIR/changed", exitFailed, `list +BROKEN +the file has \d+ bytes, want 1650`},
		{"--bundle=DIR/leaves --leaves=DIR/leaves", exitUnknown, `^stampede: the draw was not checked: not a bundle that can be verified: `},
		{"--bundle=DIR/bundle", exitUsage, `^stampede: missing flags: --leaves=FILE`},
		{"--bundle=DIR/early --leaves=DIR/leaves", exitUnknown, `list +kept +50 .*
seed +UNKNOWN +there is no seed yet`},
		{"--bundle=DIR/none --leaves=DIR/leaves", exitUnknown, `^stampede: the draw was not checked: open /.*/none: no such`},
		{"--bundle=DIR/bundle --leaves=DIR/none", exitUnknown, `^stampede: the draw was not checked: open /.*/none: no such`},
		{"--bundle=DIR/bundle --leaves=DIR/.", exitUnknown, `^stampede: the draw was not checked: /.*/. is not a regular`},
		{"--bundle=DIR/. --leaves=DIR/leaves", exitUnknown, `^stampede: the draw was not checked: read /.*: is a directory`},
	} {
		var out, errs bytes.Buffer
		args := strings.NewReplacer("=DIR", "="+folder).Replace("draw verify " + c.args)
		assert.Equal(t, c.status, run(strings.Fields(args), &out, &errs), c.args)
		assert.Regexp(t, c.want, out.String()+errs.String(), c.args)
	}
	require.NoError(t, os.WriteFile(filepath.Join(folder, "receipt"), []byte(receipt+"\n"), 0o600))
	cmd := testkit.Command(t, "draw", "verify", "--receipt=-")
	cmd.FromShell("cd " + folder + " && exec <receipt")
	cmd.Setenv("STAMPEDE_DRAW_BUNDLE", "bundle")
	cmd.Setenv("STAMPEDE_DRAW_LEAVES", "leaves")
	cmd.Start()
	assert.Equal(t, exitOK, cmd.Wait(within).ExitCode())
	assert.Contains(t, cmd.Output(), "rank 0 of 50; offered")
}
