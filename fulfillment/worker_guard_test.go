package fulfillment_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
)

func TestWorkerReportsWaitingOrders(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	registry, _ := testwork.Guarded(t, s)
	held := s.HoldSale(t, sale)
	require.Equal(t, 100, s.Crowd(t, sale, 100))
	waiting := func(orders float64) {
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%g orders wait", orders), func() bool {
			return testshop.Metric(t, registry, "stampede_stream_waiting_orders", s.Keys.Orders(0)) == orders
		})
	}
	waiting(100)
	require.Less(t, s.Rdb.XLen(t.Context(), s.Keys.Orders(0)).Val(), int64(100), "entries hold several orders")
	require.NoError(t, held.Rollback(t.Context()))
	waiting(0)
}

// A check that takes long is made less often, so that it takes a small part of a worker's time.
func TestLongChecksAreRare(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		5 * time.Millisecond:   200 * time.Millisecond, // GuardInterval is longer
		100 * time.Millisecond: 4 * time.Second,
		time.Minute:            5 * time.Second,
	} {
		require.Equal(t, want, fulfillment.PauseAfter(took))
	}
}
