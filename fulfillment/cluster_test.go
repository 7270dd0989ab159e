//go:build system

package fulfillment_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/stream"
)

// A master and its replica freeze. What their partitions lack waits, and all work on other partitions continues. The
// steps follow each other on one cluster.
func TestWorkerContinuesApartFromFrozenMaster(t *testing.T) {
	t.Parallel()
	s := testshop.NewClusterShop(t)
	const frozen = 0
	apart := s.PartitionApart(t, frozen)
	stuck, other, lost := s.OpenIn(t, frozen, 10), s.OpenIn(t, apart, 10), s.OpenIn(t, apart, 10)
	big := s.OpenIn(t, apart, 1000) // now: another new sale may lie in a frozen partition
	config, registry := testwork.Config(t, s.Shop), prometheus.NewRegistry()
	config.GuardInterval, config.Registerer = 20*time.Millisecond, registry
	testwork.Work(t, config)
	s.Buy(t, stuck, "ann")
	s.Buy(t, other, "ann")
	s.AwaitConfirmed(t, 2)
	sells := func(sale uuid.UUID) bool {
		answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "bob", Quantity: 1})
		return err == nil && answer.Verdict == reservation.Reserved
	}

	thaw := s.Freeze(t, frozen)
	began := time.Now()
	require.NoError(t, s.Rdb.Del(t.Context(), s.Keys.Sale(apart, lost)).Err())
	testkit.Eventually(t, 60*time.Second, "a sale that was lost elsewhere sells again", func() bool { return sells(lost) })
	t.Logf("a sale was rebuilt %v after another master froze", time.Since(began))
	began = time.Now()
	require.NoError(t, s.Store.Distrust(t.Context(), apart))
	testkit.Eventually(t, 60*time.Second, "another partition sells again", func() bool { return sells(other) })
	t.Logf("a partition was rebuilt %v after its server was distrusted", time.Since(began))
	s.AwaitConfirmed(t, 4)

	many := insertSales(t, s.Shop, frozen, 100)
	began = time.Now()
	require.NoError(t, s.Exec(t, `INSERT INTO releases (order_id, sale_id, user_id, quantity, again_at)
		SELECT gen_random_uuid(), id, 'eve', 1, now() - interval '1 minute' FROM sales WHERE id = ANY ($1)
		UNION ALL SELECT gen_random_uuid(), $2, 'eve', 1, now()`, many, other))
	testkit.Eventually(t, 60*time.Second, "units are released elsewhere", func() bool {
		return s.Count(t, "SELECT count(*) FROM releases WHERE sale_id = $1", other) == 0
	})
	t.Logf("units were released %v later, beside %d frozen sales", time.Since(began), len(many))

	began = time.Now()
	require.NoError(t, s.Shop.Exec(t, "UPDATE sales SET published_revision = 1 WHERE id = $1", other))
	testkit.Eventually(t, 60*time.Second, "a change is published elsewhere", func() bool {
		return s.Count(t, "SELECT revision - published_revision FROM sales WHERE id = $1", other) == 0
	})
	t.Logf("a change was published %v later", time.Since(began))

	for range 20 { // the clock is that of the stream's own server
		_, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(apart), reservation.Group)
		require.NoError(t, err)
	}
	reachable := func(partition int) float64 {
		return testshop.Metric(t, registry, "stampede_stream_reachable", s.Keys.Orders(partition))
	}
	require.Equal(t, 1.0, reachable(apart))
	require.Zero(t, reachable(frozen))
	began = time.Now()
	for i := range 200 {
		s.Buy(t, big, fmt.Sprint("user-", i))
	}
	testkit.Eventually(t, 60*time.Second, "entries are trimmed elsewhere", func() bool {
		return testshop.Metric(t, registry, "stampede_entries_trimmed_total", s.Keys.Orders(apart)) > 0
	})

	t.Logf("entries were trimmed %v later", time.Since(began))
	began = time.Now()
	require.NoError(t, s.Shop.Exec(t, "DELETE FROM releases"))
	require.NoError(t, s.Shop.Exec(t, "DELETE FROM sales WHERE id = ANY ($1)", many))
	thaw()
	testkit.Eventually(t, 60*time.Second, "the frozen partition sells again", func() bool { return sells(stuck) })
	s.AwaitConfirmed(t, 205)
	t.Logf("the frozen partition continued %v after it was thawed", time.Since(began))
}

// insertSales inserts sales of a partition that are not published.
func insertSales(t *testing.T, s *testshop.Shop, partition, n int) (sales []uuid.UUID) {
	t.Helper()
	for len(sales) < n {
		if id := uuid.Must(uuid.NewV7()); s.Keys.Partition(id) == partition {
			sales = append(sales, id)
		}
	}
	_, err := s.Pool.Exec(t.Context(),
		"INSERT INTO sales (id, name, stock, partitions) SELECT id, 'test', 10, $2 FROM unnest($1::uuid[]) AS all_ids (id)",
		sales, s.Keys.Partitions)
	require.NoError(t, err)
	return sales
}
