package fulfillment_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/stream"
)

// An operator raises STAMPEDE_PARTITIONS and restarts the ingresses before the workers.
func TestWorkerDetectsAddedPartitions(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s := testshop.NewShopOn(t, testshop.Options{Pool: pool})
	log := &testshop.CountingLog{}
	registry := prometheus.NewRegistry()
	config := testwork.Config(t, s)
	config.Logger, config.Registerer = slog.New(log), registry
	stop := testwork.Work(t, config)
	before := s.Open(t, 10)
	s.Buy(t, before, "alice")
	s.AwaitConfirmed(t, 1)

	wide := s.Keys
	wide.Partitions = 4
	more := testshop.NewShopOn(t, testshop.Options{Pool: pool, Keys: wide})
	sale := more.Open(t, 250)
	for wide.Partition(sale) == 0 {
		sale = more.Open(t, 250)
	}
	partition := wide.Partition(sale)
	testshop.Exec(t, pool, "UPDATE sales SET stock = 249 WHERE id = $1", sale)
	for i := range 250 { // one after the other: an entry for each, so that there is something to trim
		more.Buy(t, sale, fmt.Sprint("user-", i))
	}
	s.Buy(t, before, "bob")
	s.AwaitConfirmed(t, 251)

	testkit.Eventually(t, 30*time.Second, "the rejected order's unit is released in the new partition", func() bool {
		return s.Rdb.HGet(t.Context(), wide.Sale(partition, sale), "left").Val() == "1"
	})
	require.Equal(t, 1, log.Times("sales have more partitions"))
	require.Equal(t, float64(1), testshop.Metric(t, registry, "stampede_stream_reachable", wide.Orders(partition)),
		"the backlog is measured")
	testkit.Eventually(t, 30*time.Second, "handled entries are trimmed", func() bool {
		return s.Rdb.XLen(t.Context(), wide.Orders(partition)).Val() <= 100 &&
			testshop.Metric(t, registry, "stampede_entries_trimmed_total", wide.Orders(partition)) > 0
	})
	stop()
	for p := range wide.Partitions {
		b, err := stream.ReadBacklog(t.Context(), s.Rdb, wide.Orders(p), reservation.Group)
		require.NoError(t, err)
		require.Zero(t, b.Pending, fmt.Sprint(p))
	}
}
