package reservation_test

import (
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// TestPartitionsSpreadOverMasters: among any power of two of masters with equal shares of the slots, the partitions are
// spread evenly. The slots are those of Redis.
func TestPartitionsSpreadOverMasters(t *testing.T) {
	t.Parallel()
	const slots = 16384
	cluster := testkit.OwnCluster(t)
	node := redis.NewClient(&redis.Options{Addr: cluster.Nodes[0].Addr()})
	t.Cleanup(func() { _ = node.Close() })
	keys := reservation.Keys{Prefix: "test", Partitions: reservation.MaxPartitions}
	var slotOf [reservation.MaxPartitions]int64
	for p := range slotOf {
		slot, err := node.ClusterKeySlot(t.Context(), keys.Orders(p)).Result()
		require.NoError(t, err)
		slotOf[p] = slot
	}
	for masters := int64(1); masters <= reservation.MaxPartitions; masters *= 2 {
		for partitions := masters; partitions <= reservation.MaxPartitions; partitions += masters {
			on := make(map[int64]int64)
			for _, slot := range slotOf[:partitions] {
				on[slot*masters/slots]++
			}
			for master := range masters {
				require.Equal(t, partitions/masters, on[master], "master %d of %d, %d partitions", master, masters, partitions)
			}
		}
	}
}

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
