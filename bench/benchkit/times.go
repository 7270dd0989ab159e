// Package benchkit is what the benchmarks share: candidates that are compared in one run, in turns,
// and a crowd of HTTP connections that costs little enough to leave the cores to the servers.
package benchkit

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// Timed is one of several ways to do the same thing, where what counts is how long it takes.
type Timed struct {
	Name string
	// Times does it n times and returns how long that took each time. What it sets up and clears away
	// is not in these times.
	Times func(n int) Sample
}

// Sample is how long something took that was done some times.
type Sample struct {
	N        int
	P50, P99 time.Duration
}

// Sum sums up times, of which there is at least one.
func Sum(took []time.Duration) Sample {
	return Sample{N: len(took), P50: percentile(took, 50), P99: percentile(took, 99)}
}

// Timing is how long one candidate took.
type Timing struct {
	Name string
	// P50 and P99 are the medians over the rounds, and that of a round is the median over its turns.
	P50, P99 time.Duration
	// Ratio is how many times as long as the first candidate this one took: the median of the ratios
	// of the rounds, each of medians, and the least and the greatest of them. The first has 1.
	Ratio, RatioMin, RatioMax float64
}

// CompareTimes runs b.N rounds. A round is made of turns: in each of them every candidate does its
// work so many times, and the order changes from turn to turn, so that whatever else the machine does
// meets all of them alike. It reports, and returns in the order of the candidates, what Timing says.
func CompareTimes(b *testing.B, turns, times int, candidates ...Timed) []Timing {
	b.Helper()
	rounds := make([][]Sample, len(candidates))
	for round := range b.N {
		ofRound := make([][]Sample, len(candidates))
		for turn := range turns {
			for place := range candidates {
				i := (place + turn + round) % len(candidates)
				sample := candidates[i].Times(times)
				if sample.N != times {
					b.Fatalf("%s: %d times in round %d, want %d", candidates[i].Name, sample.N, round, times)
				}
				ofRound[i] = append(ofRound[i], sample)
			}
		}
		for i := range candidates {
			rounds[i] = append(rounds[i], middle(ofRound[i]))
		}
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	timings := make([]Timing, len(candidates))
	for i, c := range candidates {
		timings[i] = timing(c.Name, rounds[i], rounds[0])
		b.ReportMetric(micros(timings[i].P50), c.Name+"_p50_µs")
		b.ReportMetric(micros(timings[i].P99), c.Name+"_p99_µs")
		if i > 0 {
			b.ReportMetric(timings[i].Ratio, fmt.Sprintf("%s÷%s", c.Name, candidates[0].Name))
		}
	}
	return timings
}

// timing sums up the rounds of one candidate beside those of the first.
func timing(name string, rounds, first []Sample) Timing {
	ratios := make([]float64, len(rounds))
	for i := range rounds {
		ratios[i] = float64(rounds[i].P50) / float64(first[i].P50)
	}
	m := middle(rounds)
	return Timing{
		Name: name, P50: m.P50, P99: m.P99,
		Ratio: median(ratios), RatioMin: slices.Min(ratios), RatioMax: slices.Max(ratios),
	}
}

// middle is the median of the medians, and that of the 99th percentiles.
func middle(samples []Sample) Sample {
	var m Sample
	var p50s, p99s []time.Duration
	for _, s := range samples {
		m.N += s.N
		p50s, p99s = append(p50s, s.P50), append(p99s, s.P99)
	}
	m.P50, m.P99 = percentile(p50s, 50), percentile(p99s, 50)
	return m
}

// percentile is the smallest value that p of a hundred values do not exceed.
func percentile(values []time.Duration, p int) time.Duration {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[(len(sorted)*p+99)/100-1]
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
