package growth

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestStraightnessFindsLeastAndGreatestCost(t *testing.T) {
	t.Parallel()
	s := straightnessOf([]int{10, 100, 1000}, []float64{20, 10, 15})
	assert.Equal(t, straightness{least: 10, most: 20, leastAt: 100, mostAt: 10}, s)
	assert.InDelta(t, 2, s.ratio(), 0)
}
