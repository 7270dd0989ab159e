package locks

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"stampede/bench/rig"
)

// The figures of a measurement, in microseconds, under the name of what was measured.
const (
	p50 = ", p50"
	p99 = ", p99"
)

// put adds the percentiles of what was measured to the values of a turn.
func put(v rig.Values, what string, took []time.Duration) {
	v[what+p50], v[what+p99] = percentile(took, 50), percentile(took, 99)
}

// percentile is the smallest value that at least p percent of the values do not exceed, in microseconds.
func percentile(values []time.Duration, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return float64(sorted[(len(sorted)*p+99)/100-1]) / float64(time.Microsecond)
}

// compared writes a median and its ratio to that of the first candidate: "12.0 µs, 1.50 (1.20–1.70)".
func compared(results *rig.Results, name, first, figure string) string {
	s := results.Of(name, figure)
	if s.N == 0 || name == first {
		return s.FormatMedian(micros)
	}
	return s.FormatMedian(micros) + ", " + results.Ratio(name, figure, first, figure).Format(rig.Ratio)
}

// micros writes a time with about three digits.
func micros(v float64) string {
	switch {
	case v < 100:
		return fmt.Sprintf("%.1f µs", v)
	case v < 10_000:
		return fmt.Sprintf("%.0f µs", v)
	}
	return fmt.Sprintf("%.1f ms", v/1000)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100-i) * time.Microsecond
	}
	for p, want := range map[int]float64{50: 50, 99: 99} {
		assert.InDelta(t, want, percentile(hundred, p), 0)
	}
	assert.InDelta(t, 7, percentile(hundred[93:94], 99), 0)
	assert.InDelta(t, 0.002, percentile([]time.Duration{3, 1, 2}, 50), 0)
}
