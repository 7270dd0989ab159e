package draw_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/draw"
)

// A Ranking has the ranks that Lowest has, of each item on its own.
func TestRankingIsThatOfTheScores(t *testing.T) {
	t.Parallel()
	for range 100 {
		seed := draw.Seed(someLeaf(rand.Int64()))
		size := rand.Int64N(300)
		letters := [][]byte{{0}, []byte("abB")}[rand.IntN(2)]
		ranking := draw.NewRanking(seed, size)
		var records []draw.Record
		want := map[byte]*draw.Lowest{}
		for place := range size {
			var record draw.Record
			leaf := someLeaf(place)
			copy(record[1:], leaf[:])
			record[0] = letters[rand.IntN(len(letters))]
			if place > 0 && rand.IntN(20) == 0 { // equal scores are ranked by place
				record = records[rand.Int64N(place)]
			}
			records = append(records, record)
			ranking.Add(record)
			if want[record[0]] == nil {
				want[record[0]] = draw.NewLowest(int(size), draw.Score{})
			}
			want[record[0]].Add(place, seed.Score(record.Leaf()))
		}
		entries, err := ranking.Sort(func(place int64) (draw.Record, error) { return records[place], nil })
		require.NoError(t, err)
		require.Len(t, entries, len(want))
		next := int64(0)
		for _, letter := range letters { // their order is that of the items
			if want[letter] == nil {
				continue
			}
			for rank, r := range want[letter].Ranks() {
				require.Equal(t, r.Place, int64(ranking.Place(next)))
				require.Equal(t, rank, int(ranking.Rank(r.Place)))
				next++
			}
		}
		require.Equal(t, size, next)
	}
}

// Entries whose scores begin alike are ranked by the whole score.
func TestRankingComparesWholeScores(t *testing.T) {
	t.Parallel()
	var alike draw.Record
	low, high := draw.Record{1: 1}, draw.Record{1: 2}
	seed := draw.Seed{}
	if first, second := seed.Score(low.Leaf()), seed.Score(high.Leaf()); string(first[:]) > string(second[:]) {
		low, high = high, low
	}
	ranking := draw.NewRanking(seed, 2)
	ranking.Add(alike)
	ranking.Add(alike)
	_, err := ranking.Sort(func(place int64) (draw.Record, error) { return []draw.Record{high, low}[place], nil })
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 0}, []uint32{ranking.Rank(0), ranking.Rank(1)})

	ranking = draw.NewRanking(seed, 2)
	ranking.Add(alike)
	ranking.Add(alike)
	failed := errors.New("no list")
	_, err = ranking.Sort(func(int64) (draw.Record, error) { return alike, failed })
	require.ErrorIs(t, err, failed)
}
