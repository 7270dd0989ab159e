package locks

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// timed is one of several compared ways to do the same thing.
type timed struct {
	Name string
	// Times does it n times and returns how long each took, without setup and cleanup.
	Times func(n int) sample
}

// sample summarizes how long n repetitions took.
type sample struct {
	N        int
	P50, P99 time.Duration
}

// sum summarizes at least one time.
func sum(took []time.Duration) sample {
	return sample{N: len(took), P50: percentile(took, 50), P99: percentile(took, 99)}
}

// timing is the result of one candidate.
type timing struct {
	Name string
	// P50 and P99 are medians over the rounds; the value of a round is the median over its turns.
	P50, P99 time.Duration
	// Ratio is this candidate's time ÷ that of the first candidate: the median of the ratios of the
	// rounds, each of medians, and the least and the greatest of them. The first has 1.
	Ratio, RatioMin, RatioMax float64
}

// compareTimes runs b.N rounds. In each turn of a round every candidate does its work so many times,
// and the order changes from turn to turn, so that other load on the machine affects all of them alike.
// It reports the results, and returns them in the order of the candidates.
func compareTimes(b *testing.B, turns, times int, candidates ...timed) []timing {
	b.Helper()
	rounds := make([][]sample, len(candidates))
	for round := range b.N {
		ofRound := make([][]sample, len(candidates))
		for turn := range turns {
			for place := range candidates {
				i := (place + turn + round) % len(candidates)
				measured := candidates[i].Times(times)
				if measured.N != times {
					b.Fatalf("%s: %d times in round %d, want %d", candidates[i].Name, measured.N, round, times)
				}
				ofRound[i] = append(ofRound[i], measured)
			}
		}
		for i := range candidates {
			rounds[i] = append(rounds[i], middle(ofRound[i]))
		}
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	timings := make([]timing, len(candidates))
	for i, c := range candidates {
		timings[i] = timingOf(c.Name, rounds[i], rounds[0])
		b.ReportMetric(micros(timings[i].P50), c.Name+"_p50_µs")
		b.ReportMetric(micros(timings[i].P99), c.Name+"_p99_µs")
		if i > 0 {
			b.ReportMetric(timings[i].Ratio, fmt.Sprintf("%s÷%s", c.Name, candidates[0].Name))
		}
	}
	return timings
}

// timingOf summarizes the rounds of one candidate relative to those of the first.
func timingOf(name string, rounds, first []sample) timing {
	ratios := make([]float64, len(rounds))
	for i := range rounds {
		ratios[i] = float64(rounds[i].P50) / float64(first[i].P50)
	}
	m := middle(rounds)
	return timing{
		Name: name, P50: m.P50, P99: m.P99,
		Ratio: median(ratios), RatioMin: slices.Min(ratios), RatioMax: slices.Max(ratios),
	}
}

// middle is the median of the medians, and that of the 99th percentiles.
func middle(samples []sample) sample {
	var m sample
	var p50s, p99s []time.Duration
	for _, s := range samples {
		m.N += s.N
		p50s, p99s = append(p50s, s.P50), append(p99s, s.P99)
	}
	m.P50, m.P99 = percentile(p50s, 50), percentile(p99s, 50)
	return m
}

// percentile is the smallest value that at least p percent of the values do not exceed.
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

func TestTimingUsesMedianRound(t *testing.T) {
	t.Parallel()
	first := []sample{{3, 10, 0}, {3, 20, 0}, {3, 40, 0}}
	rounds := []sample{{3, 20, 60}, {3, 200, 50}, {3, 40, 900}}
	assert.Equal(t, timing{
		Name: "slow", P50: 40, P99: 60, Ratio: 2, RatioMin: 1, RatioMax: 10,
	}, timingOf("slow", rounds, first))
}

func TestSampleCoversAllTimes(t *testing.T) {
	t.Parallel()
	assert.Equal(t, sample{N: 3, P50: 2, P99: 3}, sum([]time.Duration{3, 1, 2}))
	assert.Equal(t, sample{N: 6, P50: 2, P99: 5}, middle([]sample{{2, 3, 4}, {2, 1, 9}, {2, 2, 5}}))
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i)
	}
	assert.Equal(t, time.Duration(50), percentile(hundred, 50))
	assert.Equal(t, time.Duration(99), percentile(hundred, 99))
	assert.Equal(t, time.Duration(7), percentile([]time.Duration{7}, 99))
	assert.Equal(t, time.Duration(2), percentile([]time.Duration{3, 1, 2}, 50))
}
