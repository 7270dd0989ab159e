package fulfillment_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// Somebody raises STAMPEDE_PARTITIONS and restarts the ingresses before the workers.
func TestWorkerDetectsAddedPartitions(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s := newShop(t, pool)
	log := &countingLog{}
	registry := prometheus.NewRegistry()
	config := s.config(t)
	config.Logger, config.Registerer = slog.New(log), registry
	stop := work(t, config)
	before := s.open(t, 10)
	s.buy(t, before, "alice")
	s.awaitConfirmed(t, 1)

	wide := s.keys
	wide.Partitions = 4
	more := newShopOn(t, pool, testkit.RedisURL(t), wide)
	sale := more.open(t, 250)
	for wide.Partition(sale) == 0 {
		sale = more.open(t, 250)
	}
	partition := wide.Partition(sale)
	_, err := pool.Exec(t.Context(), "UPDATE sales SET stock = 249 WHERE id = $1", sale)
	require.NoError(t, err)
	more.crowd(t, sale, 250)
	s.buy(t, before, "bob")
	s.awaitConfirmed(t, 251)

	testkit.Eventually(t, 10*time.Second, "the rejected order's unit is back where the sale lives", func() bool {
		return s.rdb.HGet(t.Context(), wide.Sale(partition, sale), "left").Val() == "1"
	})
	require.Equal(t, 1, log.times("sales have more partitions: reading their streams as well"))
	require.Equal(t, float64(1), valueOf(t, registry, "stampede_stream_reachable", wide.Orders(partition)), "the backlog is measured")
	testkit.Eventually(t, 10*time.Second, "handled entries are trimmed", func() bool {
		return s.rdb.XLen(t.Context(), wide.Orders(partition)).Val() <= 100 &&
			valueOf(t, registry, "stampede_entries_trimmed_total", wide.Orders(partition)) > 0
	})
	stop()
	for p := range wide.Partitions {
		b, err := fulfillment.ReadBacklog(t.Context(), s.rdb, wide.Orders(p), reservation.Group)
		require.NoError(t, err)
		require.Zero(t, b.Pending, fmt.Sprint(p))
	}
}
