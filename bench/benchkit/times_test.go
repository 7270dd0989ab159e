package benchkit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestTimingIsOfTheMedianRound(t *testing.T) {
	t.Parallel()
	first := []Sample{{3, 10, 0}, {3, 20, 0}, {3, 40, 0}}
	rounds := []Sample{{3, 20, 60}, {3, 200, 50}, {3, 40, 900}}
	assert.Equal(t, Timing{
		Name: "slow", P50: 40, P99: 60, Ratio: 2, RatioMin: 1, RatioMax: 10,
	}, timing("slow", rounds, first))
}

func TestSampleIsOfAllTimes(t *testing.T) {
	t.Parallel()
	assert.Equal(t, Sample{N: 3, P50: 2, P99: 3}, Sum([]time.Duration{3, 1, 2}))
	assert.Equal(t, Sample{N: 6, P50: 2, P99: 5}, middle([]Sample{{2, 3, 4}, {2, 1, 9}, {2, 2, 5}}))
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
