package fleet

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkRound is a round of a fleet of ten processes, with real pages of stampede dev (ingress and worker in one
// process), and with its looks into Redis and Postgres. What one takes is the share of a core that a fleet uses.
func BenchmarkRound(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	var targets []string
	for range 10 {
		targets = append(targets, newPage(b, string(text)).target())
	}
	f, s := newFleet(b, targets...)
	for range 20 {
		s.Open(b, 1000)
	}
	for range 5 {
		f.round(context.Background())
	}
	for b.Loop() {
		f.round(context.Background())
	}
	require.True(b, f.Snapshot().Processes[9].Up)
}

// BenchmarkRead is the parse of one page.
func BenchmarkRead(b *testing.B) {
	text, err := os.ReadFile("testdata/page.txt")
	require.NoError(b, err)
	for b.Loop() {
		_, err := read(text)
		require.NoError(b, err)
	}
}
