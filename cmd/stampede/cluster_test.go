//go:build system

package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// Partitions on different masters of a cluster of three, by the slots of their hash tags.
const (
	onLastMaster  = 0
	onFirstMaster = 3
)

// clusterShop has two workers and an ingress on a cluster, and crowds that buy two sales: one on the master that the
// test destroys, and one on another.
type clusterShop struct {
	*shop
	cluster        *localserver.Cluster
	operator       *testkit.ClusterOperator
	first, second  *testkit.Cmd // workers
	hurt, unharmed *rush
}

const (
	clusterStock = 200_000               // more than the crowds buy
	clusterPace  = 20 * time.Millisecond // so that the crowds leave CPU time to the servers
)

// newShopOnCluster returns a shop with four partitions on a cluster of its own.
func newShopOnCluster(t *testing.T) (*shop, *localserver.Cluster, *testkit.ClusterOperator) {
	t.Helper()
	s, cluster := newShop(t), testkit.OwnCluster(t)
	s.keys.Partitions, s.redisURL = 4, cluster.URL
	return s, cluster, testkit.Operate(t, cluster)
}

func newClusterShop(t *testing.T) *clusterShop {
	t.Helper()
	s := &clusterShop{}
	s.shop, s.cluster, s.operator = newShopOnCluster(t)
	_, url := s.serve()
	s.hurt, s.unharmed = s.rushOn(url, onLastMaster), s.rushOn(url, onFirstMaster)
	require.NotEqual(t, s.master(onLastMaster), s.master(onFirstMaster))
	s.first, s.second = s.worker("first"), s.worker("second")
	for _, worker := range []*testkit.Cmd{s.first, s.second} {
		worker.Setenv("STAMPEDE_MIN_IDLE", "3s") // a slow machine is not a dead worker
		worker.Start()
	}
	for _, r := range []*rush{s.hurt, s.unharmed} {
		r.pace = clusterPace
		r.open(t)
	}
	return s
}

// rushOn creates a sale in a partition.
func (s *clusterShop) rushOn(url string, partition int) *rush {
	s.t.Helper()
	for {
		if sale := s.sale(url, clusterStock); s.keys.Partition(sale) == partition {
			return newRush(s.shop, url, sale)
		}
	}
}

func (s *clusterShop) slot(partition int) int {
	s.t.Helper()
	return s.operator.Slot(s.keys.Orders(partition))
}

// master is the node of a partition.
func (s *clusterShop) master(partition int) int {
	s.t.Helper()
	return s.operator.Master(s.slot(partition))
}

// sell lets both crowds buy.
func (s *clusterShop) sell(what string) {
	s.t.Helper()
	s.unharmed.allow(clusterStock)
	s.hurt.sell(s.t, 200, what)
}

// survive hurts the partition on the last master while both crowds buy, and waits until its sale continues. Meanwhile
// the other sale goes on, without a rebuild.
func (s *clusterShop) survive(what string, harm func()) {
	s.t.Helper()
	s.sell("orders are accepted before: " + what)
	s.hurt.allow(clusterStock)
	epoch := s.hurt.epoch()
	refused := s.hurt.refusals()
	s.hurt.measure()
	s.unharmed.measure()
	other := s.unharmed.acceptedCount()
	harm()
	testkit.Eventually(s.t, within, "buyers of the hurt sale get 503: "+what, func() bool {
		return s.hurt.refusals() > refused
	})
	testkit.Eventually(s.t, within, "a rebuild: "+what, func() bool { return s.hurt.epoch() > epoch })
	require.Greater(s.t, s.unharmed.acceptedCount(), other, "the other sale goes on: %s", what)
	s.sell("the hurt sale continues: " + what)
	s.t.Logf("%s: dark for %v, the other sale for %v", what, s.hurt.measured(), s.unharmed.measured())
	require.Equal(s.t, 1, s.unharmed.epoch(), "the other sale is not rebuilt: %s", what)
}

// requireKept checks that every accepted order of both sales has a truthful end, and returns how many were voided.
func (s *clusterShop) requireKept() (voided int) {
	s.t.Helper()
	s.hurt.endCrowd()
	s.unharmed.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s")
	require.Zero(s.t, s.unharmed.requireTruth()["voided"], "orders of the sale whose master was not hurt")
	return s.hurt.requireTruth()["voided"]
}

func TestClusterLosesMasters(t *testing.T) {
	t.Parallel()
	s := newClusterShop(t)
	var old int
	s.survive("kill -9 of a master", func() {
		old = s.master(onLastMaster)
		s.cluster.Nodes[old].Kill()
	})
	require.NoError(t, s.cluster.Nodes[old].Restart(t.Context()))
	s.operator.Replica(s.master(onLastMaster)) // the old master, in sync

	s.survive("a master frozen beyond the node time-out", func() {
		old = s.master(onLastMaster)
		s.cluster.Nodes[old].Freeze()
	})
	s.cluster.Nodes[old].Thaw()
	s.operator.Replica(s.master(onLastMaster))
	s.sell("the sale continues after the thaw")

	s.survive("replication cut before the kill", func() {
		old = s.master(onLastMaster)
		replica := s.operator.Client(s.operator.Replica(old))
		s.first.Freeze()
		s.second.Freeze()
		require.NoError(t, replica.ConfigSet(t.Context(), "masteruser", "nobody").Err())
		require.NoError(t, replica.ConfigSet(t.Context(), "masterauth", "wrong").Err())
		require.NoError(t, s.operator.Client(old).Do(t.Context(), "CLIENT", "KILL", "TYPE", "replica").Err())
		s.hurt.sell(t, 100, "orders are accepted that no replica has")
		s.cluster.Nodes[old].Kill()
		s.first.Thaw()
		s.second.Thaw()
	})
	require.Positive(t, s.requireKept(), "voided orders")
}

func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	s := newClusterShop(t)
	s.survive("a slot moved key by key", func() {
		s.operator.MoveSlot(s.slot(onLastMaster), s.master(onLastMaster), s.master(onFirstMaster), func() {
			asked := s.hurt.answered()
			testkit.Eventually(t, within, "answers between two keys", func() bool { return s.hurt.answered() > asked+10 })
		})
	})
	s.survive("a quarter of the slots moved", func() {
		const quarter = 4096
		slot := s.slot(onLastMaster)
		first := slot - slot%quarter
		from := s.master(onLastMaster)
		s.operator.MoveSlots(first, first+quarter-1, from, s.master(1))
	})
	require.Zero(t, s.requireKept(), "voided orders")
}

// TestSentinelReplacesMasters kills the master, and the one that replaced it when the first is its replica.
func TestSentinelReplacesMasters(t *testing.T) {
	t.Parallel()
	sentinels := testkit.OwnSentinels(t)
	s := newShop(t)
	s.redisURL = sentinels.URL
	_, url := s.serve()
	r := newRush(s, url, s.sale(url, clusterStock))
	r.pace = clusterPace
	s.worker("worker").Start()
	r.open(t)
	for i, master := range sentinels.Nodes {
		replica := sentinels.Nodes[1-i]
		testkit.Eventually(t, within, "the other node is a replica in sync", func() bool {
			return sentinels.InSync(t.Context(), replica)
		})
		r.sell(t, 200, "orders are accepted before a failover")
		r.allow(clusterStock)
		epoch := r.epoch()
		r.measure()
		master.Kill()
		testkit.Eventually(t, within, "a rebuild", func() bool { return r.epoch() > epoch })
		r.sell(t, 200, "the sale continues")
		t.Logf("failover %d: dark for %v", i+1, r.measured())
		require.NoError(t, master.Restart(t.Context()))
	}
	r.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s")
	r.requireTruth()
}

// TestClusterSellsShardsToTheLastUnit: a master with a shard of the sale dies while the crowd buys.
func TestClusterSellsShardsToTheLastUnit(t *testing.T) {
	t.Parallel()
	s, cluster, operator := newShopOnCluster(t)
	_, url := s.serve()
	const stock = 2000
	r := newRush(s, url, s.createSale(url, reservation.Terms{Name: "sharded", Stock: stock, Shards: 4}))
	for _, name := range []string{"first", "second"} {
		worker := s.worker(name)
		worker.Setenv("STAMPEDE_MIN_IDLE", "3s")
		worker.Start()
	}
	r.open(t)
	r.sell(t, stock/4, "orders are accepted before the kill")
	epoch := r.epoch()
	r.allow(stock)
	cluster.Nodes[operator.Master(operator.Slot(s.keys.Orders(onLastMaster)))].Kill()
	testkit.Eventually(t, within, "a rebuild of the whole sale", func() bool { return r.epoch() > epoch })
	require.Zero(t, r.requireEnds(stock), "voided orders: the replicas had all")
}
