//go:build system

package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/crowd"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/stream"
)

// sharedShop is a shop with its own Redis, an ingress, and workers that share its partitions.
type sharedShop struct {
	*shop
	rdb     redis.UniversalClient
	url     string
	workers map[string]*testkit.Cmd
	minIdle time.Duration
}

func newSharedShop(t *testing.T, partitions, workers int, minIdle time.Duration) *sharedShop {
	t.Helper()
	s := &sharedShop{shop: newShop(t), workers: map[string]*testkit.Cmd{}, minIdle: minIdle}
	s.redisURL, s.keys.Partitions = testkit.OwnRedis(t).URL, partitions
	var err error
	s.rdb, err = connect.Control(s.redisURL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.rdb.Close() })
	_, s.url = s.serve()
	for i := range workers {
		s.join(fmt.Sprintf("worker-%d", i))
	}
	s.awaitReaders()
	return s
}

// join starts a worker.
func (s *sharedShop) join(name string) {
	c := s.worker(name)
	c.Setenv("STAMPEDE_MIN_IDLE", s.minIdle.String())
	c.Start()
	s.workers[name] = c
}

func (s *sharedShop) names() (names []string) {
	for name := range s.workers {
		names = append(names, name)
	}
	return names
}

// share returns the partitions of which a worker is the reader.
func (s *sharedShop) share(worker string) (partitions []int) {
	for p := range s.keys.Partitions {
		if stream.First(s.keys.Orders(p), s.names()) == worker {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// busiest returns the worker with the most partitions.
func (s *sharedShop) busiest() string {
	return slices.MaxFunc(s.names(), func(x, y string) int { return len(s.share(x)) - len(s.share(y)) })
}

// blocked returns how many connections wait in a blocking read.
func (s *sharedShop) blocked() (n int) {
	s.t.Helper()
	list, err := s.rdb.ClientList(s.t.Context()).Result()
	require.NoError(s.t, err)
	for line := range strings.Lines(list) {
		if strings.Contains(line, "cmd=xreadgroup") && strings.Contains(line, " flags=b ") {
			n++
		}
	}
	return n
}

// read returns the partitions that a worker reads, by its metrics.
func (s *sharedShop) read(worker string) (partitions []int) {
	s.t.Helper()
	shown := scrape(s.t, "http://"+loggedAddr(s.workers[worker], "metrics are served"))
	for p := range s.keys.Partitions {
		if slices.Contains(shown, fmt.Sprintf(`stampede_stream_readers{stream="%s"} 1`, s.keys.Orders(p))) {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// awaitReaders waits until each partition is read by the worker that comes first, and by no other.
func (s *sharedShop) awaitReaders() {
	s.t.Helper()
	for name := range s.workers {
		testkit.Eventually(s.t, within, name+" reads its share", func() bool {
			return slices.Equal(s.read(name), s.share(name))
		})
	}
	testkit.Eventually(s.t, within, "each partition has one connection that waits", func() bool {
		return s.blocked() == s.keys.Partitions
	})
}

// lose ends a worker, and requires that the others read its partitions within --min-idle.
func (s *sharedShop) lose(worker string, how func(*testkit.Cmd)) *testkit.Cmd {
	s.t.Helper()
	how(s.workers[worker])
	lost, began := s.workers[worker], time.Now()
	delete(s.workers, worker)
	for name := range s.workers {
		testkit.Eventually(s.t, within, name+" reads its part of the lost share", func() bool {
			return slices.Equal(s.read(name), s.share(name))
		})
	}
	assert.Less(s.t, time.Since(began), s.minIdle)
	return lost
}

// saleIn creates a sale in a partition.
func (s *sharedShop) saleIn(partition int, stock int64) uuid.UUID {
	s.t.Helper()
	for {
		if sale := s.sale(s.url, stock); s.keys.Partition(sale) == partition {
			return sale
		}
	}
}

// load sells a sale in each of the partitions while during runs, and requires that every accepted order reaches
// Postgres once.
func (s *sharedShop) load(partitions []int, stock int, over time.Duration, during func()) {
	s.t.Helper()
	var running sync.WaitGroup
	var checks []func()
	for _, p := range partitions {
		sale := s.saleIn(p, int64(stock))
		buyers, verifier := s.crowd(crowd.Config{
			URLs: []string{s.url}, Sale: sale, Buyers: stock, Over: over, DoubleClicks: 0.05,
		})
		running.Go(func() { buyers.Run(s.t.Context()) })
		checks = append(checks, func() { s.requireKept(buyers, verifier, sale, stock) })
	}
	during()
	running.Wait()
	for _, check := range checks {
		check()
	}
}

func TestWorkersReadEachPartitionOverOneConnection(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 8, 4, 4*time.Second)
	for range 20 {
		assert.LessOrEqual(t, s.blocked(), 8)
	}
}

// A worker that is killed or hangs in the middle of a sale has successors within --min-idle, and what it has read is
// recorded once.
func TestPartitionsOfLostWorkerGetNewReaders(t *testing.T) {
	t.Parallel()
	for how, lose := range map[string]func(*testkit.Cmd){"killed": (*testkit.Cmd).Kill, "hanging": (*testkit.Cmd).Freeze} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			s := newSharedShop(t, 8, 4, 4*time.Second)
			victim := s.busiest()
			partitions := s.share(victim)
			var lost *testkit.Cmd
			s.load(partitions, 200, 8*time.Second, func() {
				testkit.Eventually(t, within, "the sale has begun", func() bool {
					return s.rdb.XLen(t.Context(), s.keys.Orders(partitions[0])).Val() > 0
				})
				lost = s.lose(victim, lose)
			})
			if how == "hanging" {
				lost.Thaw()
				s.workers[victim] = lost
				s.awaitReaders()
			}
		})
	}
}

// A worker that stops has handed its partitions over when it ends, and no order waits for --min-idle or a good part of
// it.
func TestWorkersJoinAndStopWithoutGap(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 4, 2, 40*time.Second)
	s.load([]int{0, 1, 2, 3}, 300, 25*time.Second, func() {
		s.join("worker-2")
		s.join("worker-3")
		s.awaitReaders()
		leaver := s.busiest()
		assert.Zero(t, s.workers[leaver].Stop().ExitCode())
		delete(s.workers, leaver)
		for name := range s.workers {
			assert.Equal(t, s.share(name), s.read(name), "%s has taken over", name)
		}
		s.awaitReaders()
	})
	var longest time.Duration
	require.NoError(t, s.pool.QueryRow(t.Context(),
		"SELECT max(occurred_at - reserved_at) FROM order_events WHERE reserved_at IS NOT NULL").Scan(&longest))
	assert.Less(t, longest, s.minIdle/10, "from the reservation to the commit")
}

func TestIdleWorkersHoldNoBlockingConnection(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 1, 3, 4*time.Second)
	s.lose(s.busiest(), (*testkit.Cmd).Kill)
	s.awaitReaders()
}

// The estimate of the orders that wait is that of the worker that reads the partition now, not of one that has read it
// while that was frozen.
func TestBacklogIsTheEstimateOfItsReader(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 1, 2, 4*time.Second)
	sale, key := s.saleIn(0, 1000), s.keys.Orders(0)
	first := s.busiest()
	frozen := s.workers[first]
	hold := (&testshop.Shop{Pool: s.pool}).HoldSale
	waiting := func(of *testkit.Cmd, orders float64) {
		t.Helper()
		url := "http://" + loggedAddr(of, "metrics are served")
		testkit.Eventually(t, within, fmt.Sprintf("%g orders wait", orders), func() bool {
			return sum(t, url, `stampede_stream_waiting_orders{group="fulfillment",stream="`+key) == orders
		})
	}

	s.lose(first, (*testkit.Cmd).Freeze)
	successor := s.workers[s.busiest()]
	const many = 100
	held := hold(t, sale)
	var buyers sync.WaitGroup
	for i := range many {
		buyers.Go(func() { assert.NoError(t, s.tryBuy(s.url, sale, fmt.Sprintf("ann-%d", i))) })
	}
	buyers.Wait()
	require.Less(t, s.rdb.XLen(t.Context(), key).Val(), int64(many), "entries hold several orders")
	waiting(successor, many)
	frozen.Thaw()
	s.workers[first] = frozen
	testkit.Eventually(t, within, "the thawed worker reads again", func() bool {
		return slices.Equal(s.read(first), s.share(first))
	})
	require.NoError(t, held.Rollback(t.Context()))
	for _, worker := range s.workers {
		waiting(worker, 0)
	}
	s.awaitReaders()
	hold(t, sale)
	s.buy(s.url, sale, "bob")
	for _, worker := range s.workers {
		waiting(worker, 1)
	}
}
