package draw_test

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/draw"
)

func sorted(all []draw.Ranked) []draw.Ranked {
	all = append([]draw.Ranked{}, all...)
	slices.SortFunc(all, func(a, b draw.Ranked) int {
		return cmp.Or(bytes.Compare(a.Score[:], b.Score[:]), cmp.Compare(a.Place, b.Place))
	})
	return all
}

func TestLowestIsTheBeginningOfAllSorted(t *testing.T) {
	t.Parallel()
	for range 300 {
		seed := draw.Seed(someLeaf(rand.Int64()))
		var all []draw.Ranked
		for place := range rand.Int64N(500) {
			score := seed.Score(someLeaf(place))
			if rand.IntN(50) == 0 && place > 0 { // equal scores are ranked by place
				score = all[rand.Int64N(place)].Score
			}
			all = append(all, draw.Ranked{Place: place, Score: score})
		}
		if rand.IntN(2) == 0 {
			slices.Reverse(all) // the order in which they come does not matter
		}
		want := sorted(all)
		above := draw.Score{}
		if len(want) > 0 && rand.IntN(2) == 0 {
			above = want[rand.IntN(len(want))].Score
		}
		want = slices.DeleteFunc(want, func(r draw.Ranked) bool { return bytes.Compare(r.Score[:], above[:]) <= 0 })
		k := 1 + rand.IntN(100)
		lowest := draw.NewLowest(k, above)
		for i, one := range all {
			lowest.Add(one.Place, one.Score)
			if i%97 == 0 {
				lowest.Ranks() // may be asked for in between
			}
		}
		require.Equal(t, want[:min(k, len(want))], append([]draw.Ranked{}, lowest.Ranks()...))
	}
}

// chiSquared compares how often each hundredth of the ranks falls on each hundredth of the places with even chances.
func chiSquared(ranked []draw.Ranked) (sum float64) {
	const parts = 100
	var found [parts][parts]float64
	for rank, r := range ranked {
		found[r.Place*parts/int64(len(ranked))][rank*parts/len(ranked)]++
	}
	expected := float64(len(ranked)) / (parts * parts)
	for _, row := range found {
		for _, n := range row {
			sum += (n - expected) * (n - expected) / expected
		}
	}
	return sum
}

// Of even chances, the sum has the χ² distribution with (100-1)² = 9801 degrees of freedom, because all sums of rows
// and columns are given: its mean is 9801 and its standard deviation √(2·9801) = 140. The bounds are four of these on
// each side, which even chances miss for one seed in 16,000; the seed is fixed, so the result is always the same.
func TestRanksDoNotDependOnPlaces(t *testing.T) {
	t.Parallel()
	const entries, low, high = 1_000_000, 9801 - 4*140.0, 9801 + 4*140.0
	seed := draw.Seed(someLeaf(-2))
	all := make([]draw.Ranked, entries)
	for place := range all {
		all[place] = draw.Ranked{Place: int64(place), Score: seed.Score(someLeaf(int64(place)))}
	}
	sum := chiSquared(sorted(all))
	t.Logf("χ² = %.0f", sum)
	require.Greater(t, sum, low, "more even than by chance")
	require.Less(t, sum, high)

	// It is found if the first hundredth of the entries has two chances each.
	for place := range entries / 100 {
		if second := seed.Score(someLeaf(entries + int64(place))); bytes.Compare(second[:], all[place].Score[:]) < 0 {
			all[place].Score = second
		}
	}
	require.Greater(t, chiSquared(sorted(all)), high)
}
