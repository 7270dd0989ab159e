package main

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/crowd"
	"stampede/internal/testkit"
)

// A worker that dies at any of these instants leaves every accepted order exactly once in Postgres,
// whether another worker takes over or it comes back under its own name.
func TestKilledWorkerLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.BeforePersist, crashpoint.AfterCommit, crashpoint.BeforeAck} {
		for name, successor := range map[string]string{
			"another worker takes over": "second",
			"the same one comes back":   "first",
		} {
			t.Run(point+"/"+name, func(t *testing.T) {
				t.Parallel()
				const stock, buyers = 300, 900
				s := newShop(t)
				_, url := s.serve()
				sale := s.sale(url, stock)
				victim := s.worker("first")
				victim.Setenv(crashpoint.Env, point+":3")
				victim.Start()

				people, books := s.crowd(crowd.Config{
					URLs: []string{url}, Sale: sale, Buyers: buyers, Over: time.Second,
					DoubleClicks: 0.1,
				})
				var coming sync.WaitGroup
				coming.Go(func() { people.Run(t.Context()) })
				victim.WaitKilled(within)
				s.worker(successor).Start()
				coming.Wait()
				s.requireKept(people, books, sale, stock)
			})
		}
	}
}

// Buyers whose ingress dies under them try again with the same key at another, and end with one order
// each at most.
func TestKilledIngressLosesAndDuplicatesNoOrder(t *testing.T) {
	t.Parallel()
	const stock, buyers = 600, 1500
	s := newShop(t)
	victim, url1 := s.serve()
	_, url2 := s.serve()
	sale := s.sale(url2, stock)
	s.worker("worker").Start()

	people, books := s.crowd(crowd.Config{
		URLs: []string{url1, url2}, Sale: sale, Buyers: buyers, Over: 2 * time.Second, DoubleClicks: 0.2,
	})
	var coming sync.WaitGroup
	coming.Go(func() { people.Run(t.Context()) })
	testkit.Eventually(t, within, "the middle of the sale", func() bool { return people.Progress().Accepted > stock/3 })
	victim.Kill()
	coming.Wait()
	require.NotEmpty(t, people.Report().Retries, "the crash must have been felt")
	s.requireKept(people, books, sale, stock)
}

func TestTenThousandBuyersOnAHundredUnits(t *testing.T) {
	t.Parallel()
	const stock, buyers = 100, 10_000
	s := newShop(t)
	_, url := s.serve()
	sale := s.sale(url, stock)
	s.worker("worker").Start()
	people, books := s.crowd(crowd.Config{
		URLs: []string{url}, Sale: sale, Buyers: buyers, DoubleClicks: 0.05, Connections: 1000, TryTimeout: 20 * time.Second,
	})
	people.Run(t.Context())
	s.requireKept(people, books, sale, stock)
}
