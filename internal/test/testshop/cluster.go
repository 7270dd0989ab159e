package testshop

import (
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// ClusterShop is a shop on a Redis Cluster of its own, with partitions on each master.
type ClusterShop struct {
	*Shop
	Cluster *localserver.Cluster
}

func NewClusterShop(t testing.TB) ClusterShop {
	t.Helper()
	cluster := testkit.OwnCluster(t)
	keys := reservation.Keys{Prefix: "test", Partitions: 8}
	return ClusterShop{NewShopOn(t, testkit.Pool(t), cluster.URL, keys), cluster}
}

// masterOf returns the index of the master that has a partition, which must have had no failover.
func (s ClusterShop) masterOf(t testing.TB, partition int) int {
	t.Helper()
	master, err := s.Rdb.(*redis.ClusterClient).MasterForKey(t.Context(), s.Keys.Server(partition))
	require.NoError(t, err)
	for i, node := range s.Cluster.Nodes {
		if node.Addr() == master.Options().Addr {
			return i
		}
	}
	t.Fatalf("no node has the address %s of the master of partition %d", master.Options().Addr, partition)
	return 0
}

// PartitionApart returns a partition on another master than the partition.
func (s ClusterShop) PartitionApart(t testing.TB, from int) int {
	t.Helper()
	for p := range s.Keys.Partitions {
		if s.masterOf(t, p) != s.masterOf(t, from) {
			return p
		}
	}
	t.Fatal("all partitions are on one master")
	return 0
}

// Freeze suspends the master of a partition and its replica, so that the partition has no server until thaw is called.
func (s ClusterShop) Freeze(t testing.TB, partition int) (thaw func()) {
	t.Helper()
	master := s.masterOf(t, partition)
	nodes := []*localserver.Redis{s.Cluster.Nodes[master], s.Cluster.Nodes[master+len(s.Cluster.Nodes)/2]}
	for _, node := range nodes {
		node.Freeze()
	}
	return func() {
		for _, node := range nodes {
			node.Thaw()
		}
	}
}

// OpenIn opens a sale in a partition.
func (s *Shop) OpenIn(t testing.TB, partition int, stock int64) uuid.UUID {
	t.Helper()
	for {
		if sale := s.Open(t, stock); s.Keys.Partition(sale) == partition {
			return sale
		}
	}
}
