// Package benchkit is what the benchmarks share: candidates that are compared in one run, in turns,
// and a crowd of HTTP connections that costs little enough to leave the cores to the servers.
package benchkit

import (
	"fmt"
	"slices"
	"testing"
)

// Candidate is one of several ways to do the same work.
type Candidate struct {
	Name string
	// Round does the work for a while and returns how much of it was done in a second. It sets up and
	// clears away outside of the time that it measures.
	Round func(round int) float64
}

// Compare runs b.N rounds; in each of them every candidate has a turn, and the order changes from
// round to round, so that a machine that grows slower meets all of them alike. It reports the
// median of each candidate and, of the first against each other one, the median of the ratios of
// the rounds. Run it with -benchtime 5x for five rounds.
func Compare(b *testing.B, unit string, candidates ...Candidate) {
	b.Helper()
	rates := make([][]float64, len(candidates))
	for round := range b.N {
		for turn := range candidates {
			i := (turn + round) % len(candidates)
			rate := candidates[i].Round(round)
			if rate <= 0 {
				b.Fatalf("%s did nothing in round %d", candidates[i].Name, round)
			}
			rates[i] = append(rates[i], rate)
			b.Logf("round %d: %s %.0f %s", round, candidates[i].Name, rate, unit)
		}
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	for i, c := range candidates {
		b.ReportMetric(median(rates[i]), fmt.Sprintf("%s_%s", c.Name, unit))
		if i == 0 {
			continue
		}
		ratios := make([]float64, b.N)
		for round := range ratios {
			ratios[round] = rates[0][round] / rates[i][round]
		}
		b.ReportMetric(median(ratios), fmt.Sprintf("%s÷%s", candidates[0].Name, c.Name))
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
