//go:build system

package retire_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
)

// A worker that dies at any step of it leaves a sale that the next one finishes. Meanwhile other sales go on.
func TestRetirementIsFinishedAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.SaleRetired, crashpoint.ShardRetired, crashpoint.ShardRetired + ":2", crashpoint.ShardRetired + ":4",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := testshop.OnOwnRedis(t, 8)
			sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
				Name: "test", Stock: 300, PerOrderLimit: 10, Shards: 4,
			})
			require.NoError(t, err)
			running := s.Open(t, 1_000_000)
			require.Equal(t, 200, s.Crowd(t, sale.ID, 200))
			end(t, s, sale.ID)

			victim := s.Process(t, "retiring worker")
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(60 * time.Second)
			require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM sales WHERE retired_at IS NOT NULL"))
			if point == crashpoint.SaleRetired { // otherwise some shards, or all, had their script
				require.Contains(t, testwork.Text(t, testwork.Audit(t, s, sale.ID)), "Redis still has 200 buyers")
			}

			crowd, stop := context.WithCancel(t.Context())
			bought := make(chan int)
			go func() {
				n := 0
				for ; crowd.Err() == nil; n++ {
					s.Buy(t, running, fmt.Sprintf("late-%d", n))
				}
				bought <- n
			}()
			successor := s.Process(t, "retiring worker")
			successor.Start()
			testkit.Eventually(t, 60*time.Second, "the retirement is published", func() bool {
				return s.Count(t, "SELECT count(*) FROM sales WHERE id = $1 AND published_revision = revision", sale.ID) == 1
			})
			stop()
			n := <-bought
			s.AwaitConfirmed(t, 200+n)
			testwork.AwaitRest(t, s)
			requireRetired(t, s, sale.ID)
			require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM sale_events WHERE type = 'SaleRetired'"))
			require.True(t, successor.Stop().Success())
		})
	}
}

// The memory of a retired sale does not depend on its buyers.
func TestRetiredSaleTakesConstantMemory(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	size := func(sale uuid.UUID) (bytes int64) {
		for _, key := range []string{s.Keys.Sale(0, sale), s.Keys.Buyers(0, sale), s.Keys.Ended(0, sale)} {
			bytes += s.Rdb.MemoryUsage(t.Context(), key, 0).Val()
		}
		return bytes
	}
	var sizes []int64
	for _, n := range []int{10, 2000} {
		sale := s.Open(t, 10_000)
		require.Equal(t, n, s.Crowd(t, sale, n))
		testwork.Fulfil(t, s)
		end(t, s, sale)
		before := size(sale)
		require.Equal(t, 1, sweep(t, s))
		sizes = append(sizes, size(sale))
		t.Logf("%d buyers: %d bytes before, %d after", n, before, size(sale))
	}
	require.Less(t, sizes[1], int64(1000))
	require.InDelta(t, sizes[0], sizes[1], 64)
}
