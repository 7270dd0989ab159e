//go:build system

package audit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/audit"
)

// A master and its replica freeze. The audit says which partitions it could not read, and still finds what differs in
// the others. A sale with a shard in a frozen partition cannot be read.
func TestAuditChecksPartitionsApartFromFrozenMaster(t *testing.T) {
	t.Parallel()
	s := testshop.NewClusterShop(t)
	const frozen = 0
	apart := s.PartitionApart(t, frozen)
	stuck, other := s.OpenIn(t, frozen, 10), s.OpenIn(t, apart, 10)
	spread := s.OpenSharded(t, 80, 8)
	for s.Keys.Partition(spread) != apart { // its first shard is not in the frozen partition
		spread = s.OpenSharded(t, 80, 8)
	}
	stop := testwork.Work(t, testwork.Config(t, s.Shop))
	s.Buy(t, stuck, "ann")
	s.Buy(t, other, "ann")
	require.Equal(t, 20, s.Crowd(t, spread, 20))
	s.AwaitConfirmed(t, 22)
	stop()
	look := func() audit.Report {
		report, err := audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Wait: 10 * time.Second})
		require.NoError(t, err)
		return report
	}
	whole := look()
	require.False(t, whole.Broken() || whole.Unchecked(), "%+v", whole.Promises)

	thaw := s.Freeze(t, frozen)
	found := look()
	require.False(t, found.Broken(), "a sale that cannot be read is no difference: %+v", found.Promises)
	require.True(t, found.Unchecked())
	require.Contains(t, found.Promise("S4").Unchecked[0], "partition 0: ")
	require.Empty(t, found.Promise("S1").Unchecked, "Postgres alone shows it")
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(apart, other), "left", -1).Err())
	found = look()
	require.EqualValues(t, 1, found.Promise("S4").Found, "%+v", found.Promises)
	require.Equal(t, other, *found.Promise("S4").Findings[0].Sale)
	thaw()
	require.NoError(t, s.Rdb.HIncrBy(t.Context(), s.Keys.Sale(apart, other), "left", 1).Err())
	testkit.Eventually(t, testshop.Soon, "all partitions answer", func() bool { return !look().Unchecked() })
	require.False(t, look().Broken())
}
