package draw_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/draw"
)

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
