//go:build system

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/dashboard/fleet"
	"stampede/internal/test/testkit"
	"stampede/reservation"
)

// TestTopOnCluster: the figures of all masters are one, and a master that is gone hides none of the others.
func TestTopOnCluster(t *testing.T) {
	t.Parallel()
	s, cluster, operator := newShopOnCluster(t)
	_, ingress := s.serve()
	targets := []string{ingress}
	for _, name := range []string{"one", "two"} {
		worker := s.worker(name)
		worker.Start()
		targets = append(targets, "http://"+loggedAddr(worker, "metrics are served"))
	}
	sharded := s.createSale(ingress, reservation.Terms{Name: "sharded", Stock: 1000, Shards: 4})
	whole := s.sale(ingress, 1000)
	for s.keys.Partition(whole) != onFirstMaster {
		whole = s.sale(ingress, 1000)
	}
	hold, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.Background()) })
	_, err = hold.Exec(t.Context(), "SELECT FROM sales FOR UPDATE") // so that orders wait
	require.NoError(t, err)
	const orders = 40
	for i := range orders {
		s.buy(ingress, sharded, fmt.Sprint("user-", i))
	}
	var found fleet.Snapshot
	look := func(id uuid.UUID) fleet.Sale {
		return found.Sales[slices.IndexFunc(found.Sales, func(sale fleet.Sale) bool { return sale.ID == id })]
	}
	testkit.Eventually(t, within, "all orders wait, in all partitions, each of which is read", func() bool {
		found = s.snapshot(targets...)
		var streams []string
		for _, p := range found.Processes {
			streams = append(streams, p.Readers...)
		}
		slices.Sort(streams)
		return found.Rates.Backlog == orders && look(sharded).Held == orders && len(found.RedisNodes) == 3 &&
			slices.Equal(s.orderStreams(4), streams)
	})
	require.EqualValues(t, 1000-orders, look(sharded).Available)
	var masters []string
	for _, node := range found.RedisNodes {
		masters = append(masters, node.Name)
		require.True(t, node.Reachable)
		require.Positive(t, node.UsedBytes)
		require.Positive(t, node.MaxBytes)
		s.awaitSeries(targets[1], fmt.Sprintf("stampede_redis_up{node=%q} 1", node.Name),
			fmt.Sprintf("stampede_redis_memory_used_bytes{node=%q} ", node.Name))
	}
	s.awaitSeries(targets[2], fmt.Sprintf("stampede_sale_units{kind=%q,sale=%q} %d", "held", sharded, orders))
	require.NoError(t, hold.Rollback(t.Context()))

	lost := operator.MasterOf(operator.SlotOf(s.keys.Orders(onLastMaster)))
	gone := cluster.Nodes[lost].Addr()
	require.Contains(t, masters, gone)
	cluster.Nodes[operator.ReplicaOf(lost)].Freeze()
	cluster.Nodes[lost].Freeze()
	testkit.Eventually(t, within, "the lost master is shown, and the others are not lost", func() bool {
		found = s.snapshot(targets...)
		return found.Redis.Reachable && look(whole).UnitsKnown && len(found.RedisNodes) == 3 &&
			slices.ContainsFunc(found.RedisNodes, func(n fleet.RedisNode) bool { return n.Name == gone && !n.Reachable })
	})
	require.False(t, look(sharded).UnitsKnown)
	require.True(t, slices.ContainsFunc(found.Troubles, func(trouble fleet.Trouble) bool {
		return trouble.Severity == fleet.Critical && strings.Contains(trouble.Text, gone)
	}), found.Troubles)
	var beginnings []string
	for _, node := range masters {
		up := 1
		if node == gone {
			up = 0
		}
		beginnings = append(beginnings, fmt.Sprintf("stampede_redis_up{node=%q} %d", node, up))
	}
	beginnings = append(beginnings, fmt.Sprintf("stampede_sale_units{kind=%q,sale=%q} ", "available", whole))
	s.awaitSeries(targets[1], beginnings...)
}
