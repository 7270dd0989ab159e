//go:build system

package main

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/dev/crowd"
	"stampede/internal/test/testkit"
)

// If a worker dies at any of these points, every accepted order is in Postgres exactly once, whether
// another worker takes over or the worker restarts under its own name.
func TestKilledWorkerLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforePersist, crashpoint.AfterCommit, crashpoint.BeforeAck} {
		for name, successor := range map[string]string{
			"another worker takes over": "second",
			"same worker restarts":      "first",
		} {
			t.Run(point+"/"+name, func(t *testing.T) {
				t.Parallel()
				const stock, crowdSize = 300, 900
				s := newShop(t)
				_, url := s.serve()
				sale := s.sale(url, stock)
				victim := s.worker("first")
				victim.Setenv(crashpoint.Env, point+":3")
				victim.Start()

				buyers, verifier := s.crowd(crowd.Config{
					URLs: []string{url}, Sale: sale, Buyers: crowdSize, Over: time.Second,
					DoubleClicks: 0.1,
				})
				var running sync.WaitGroup
				running.Go(func() { buyers.Run(t.Context()) })
				victim.WaitKilled(within)
				s.worker(successor).Start()
				running.Wait()
				s.requireKept(buyers, verifier, sale, stock)
			})
		}
	}
}

// Buyers of a killed ingress retry at another one with the same key, and get at most one order each.
func TestKilledIngressLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	const stock, crowdSize = 600, 1500
	s := newShop(t)
	victim, url1 := s.serve()
	_, url2 := s.serve()
	sale := s.sale(url2, stock)
	s.worker("worker").Start()

	buyers, verifier := s.crowd(crowd.Config{
		URLs: []string{url1, url2}, Sale: sale, Buyers: crowdSize, Over: 2 * time.Second, DoubleClicks: 0.2,
	})
	var running sync.WaitGroup
	running.Go(func() { buyers.Run(t.Context()) })
	testkit.Eventually(t, within, "the middle of the sale", func() bool { return buyers.Progress().Accepted > stock/3 })
	victim.Kill()
	running.Wait()
	require.NotEmpty(t, buyers.Report().Retries, "the crash must cause retries")
	s.requireKept(buyers, verifier, sale, stock)
}

func TestTenThousandBuyersOnAHundredUnits(t *testing.T) {
	t.Parallel()
	const stock, crowdSize = 100, 10_000
	s := newShop(t)
	_, url := s.serve()
	sale := s.sale(url, stock)
	s.worker("worker").Start()
	buyers, verifier := s.crowd(crowd.Config{
		URLs: []string{url}, Sale: sale, Buyers: crowdSize, DoubleClicks: 0.05,
		Connections: 1000, TryTimeout: 20 * time.Second,
	})
	buyers.Run(t.Context())
	s.requireKept(buyers, verifier, sale, stock)
}
