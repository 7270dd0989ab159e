package reservation_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// TestPartitionNamesAreUnique: they never change either, so that data in Redis is found again.
func TestPartitionNamesAreUnique(t *testing.T) {
	t.Parallel()
	keys := reservation.Keys{Prefix: "test", Partitions: reservation.MaxPartitions}
	require.Equal(t, "test:{0}:orders", keys.Orders(0))
	require.Equal(t, "test:{1ac}:orders", keys.Orders(1))
	seen := make(map[string]bool)
	for p := range reservation.MaxPartitions {
		name := keys.Orders(p)
		require.False(t, seen[name], name)
		require.Equal(t, 1, strings.Count(name, "{"), name)
		seen[name] = true
	}
}
