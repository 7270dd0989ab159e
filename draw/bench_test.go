package draw_test

import (
	"testing"

	"stampede/draw"
)

// Each entry of a draw is a leaf of the tree and has a score.
func BenchmarkRootAndLowest(b *testing.B) {
	var tree draw.Tree
	var r draw.Record
	seed, lowest := draw.Seed{1}, draw.NewLowest(100_000, draw.Score{})
	b.ReportAllocs()
	for place := range int64(b.N) {
		r[1], r[2], r[3], r[4] = byte(place), byte(place>>8), byte(place>>16), byte(place>>24)
		leaf := r.Leaf()
		tree.Add(leaf)
		lowest.Add(place, seed.Score(leaf))
	}
	tree.Root()
	lowest.Ranks()
}
