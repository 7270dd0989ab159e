package telemetry

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func TestGuardAgeIsThatOfOldestPartition(t *testing.T) {
	t.Parallel()
	a, err := NewGuardAge(prometheus.NewRegistry(), "worker")
	require.NoError(t, err)
	past := time.Now().Add(-time.Hour)
	a.idle = past
	require.InDelta(t, 3600, a.seconds(), 60, "it has not begun")
	a.Guards([]int{0, 1})
	a.Verified(0)
	require.InDelta(t, 0, a.seconds(), 60)
	a.verified[1] = past
	a.Guards([]int{0, 1})
	require.InDelta(t, 3600, a.seconds(), 60, "partition 1 was not verified since")
	a.Verified(1)
	require.InDelta(t, 0, a.seconds(), 60)
	a.verified[1] = past
	a.Guards([]int{0})
	a.Verified(1)
	require.InDelta(t, 0, a.seconds(), 60, "partition 1 is not guarded any more")
	a.Guards(nil)
	require.InDelta(t, 0, a.seconds(), 60)

	var none *GuardAge
	none.Guards([]int{0})
	none.Verified(0)
}
