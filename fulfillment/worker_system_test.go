//go:build system

package fulfillment_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/fulfillment/metrics"
	"stampede/internal/connect"
	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/stream"
)

// The workers are stopped and replaced continuously. Each finishes what its predecessor has read and not finished.
func TestRollingWorkersLoseAndDuplicateNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 2000)
	done := make(chan struct{})
	var workers sync.WaitGroup
	for lane := range 2 {
		config := testwork.Config(t, s)
		config.Consumer, config.BatchMax, config.MinIdle = fmt.Sprintf("worker-%d", lane), 20, 200*time.Millisecond
		workers.Go(func() {
			for {
				worker, err := fulfillment.NewWorker(config)
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond+rand.N(300*time.Millisecond))
				if err := worker.Run(ctx); err != nil {
					t.Error(err)
				}
				cancel()
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	accepted := s.Crowd(t, sale, 2000)
	s.AwaitConfirmed(t, accepted)
	testwork.AwaitRest(t, s)
	close(done)
	workers.Wait()
	require.EqualValues(t, accepted, testshop.Sold(t, s.Pool, sale))
	require.EqualValues(t, accepted, s.Count(t, "SELECT count(*) FROM order_events"))
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerWaitsForPostgresWithoutDeadLetters(t *testing.T) {
	t.Parallel()
	s, server := testshop.OnOwnPostgres(t)
	sale := s.Open(t, 2000)
	log := &testshop.CountingLog{}
	registry := prometheus.NewRegistry()
	config := testwork.Config(t, s)
	config.Logger, config.Registerer = slog.New(log), registry
	config.BatchMax, config.MaxDeliveries = 10, 1
	stop := testwork.Work(t, config)
	s.Crowd(t, sale, 100)
	s.AwaitConfirmed(t, 100)

	server.StopImmediate()
	for i := range 1400 {
		s.Buy(t, sale, fmt.Sprintf("later-%d", i))
	}
	failing := func() float64 { return testshop.Metric(t, registry, "stampede_worker_failing", "record") }
	testkit.Eventually(t, 30*time.Second, "the metrics show the outage", func() bool { return failing() == 1 })
	// An outage does not fill the process: it stops reading at a bound.
	testkit.Eventually(t, 30*time.Second, "the worker has stopped reading", func() bool {
		return s.Rdb.XPending(t.Context(), s.Keys.Orders(0), reservation.Group).Val().Count == 4*order.MaxPerMessage
	})
	s.Restart(t, server)
	s.AwaitConfirmed(t, 1500)
	testwork.AwaitRest(t, s)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
	require.EqualValues(t, 1500, testshop.Sold(t, s.Pool, sale))
	require.Zero(t, failing())
	require.Equal(t, 1, log.Times("cannot record orders in Postgres, trying again"), "an outage is logged once")
	require.Equal(t, 1, log.Times("can record orders in Postgres again"))
	stop()
}

func TestWorkerStopsPromptlyWithoutPostgres(t *testing.T) {
	t.Parallel()
	s, server := testshop.OnOwnPostgres(t)
	sale := s.Open(t, 100)
	config := testwork.Config(t, s)
	config.MaxDeliveries = 1 // one counted nack would make a dead letter
	config.DrainTimeout = 2 * time.Minute
	registry := prometheus.NewRegistry()
	config.Registerer = registry
	stop := testwork.Work(t, config)
	s.Buy(t, sale, "first")
	s.AwaitConfirmed(t, 1)
	server.StopImmediate()
	for i := range 50 {
		s.Buy(t, sale, fmt.Sprintf("later-%d", i))
	}
	testkit.Eventually(t, 30*time.Second, "the metrics show the outage", func() bool {
		return testshop.Metric(t, registry, "stampede_worker_failing", "record") == 1
	})
	started := time.Now()
	stop()
	require.Less(t, time.Since(started), config.DrainTimeout/2)
	b, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(0), reservation.Group)
	require.NoError(t, err)
	require.EqualValues(t, 50, b.Lag+b.Pending)

	s.Restart(t, server)
	config.Registerer = nil
	testwork.Work(t, config)
	s.AwaitConfirmed(t, 51)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
}

func TestWorkerStartsWithoutPostgres(t *testing.T) {
	t.Parallel()
	s, server := testshop.OnOwnPostgres(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "alice")
	server.StopImmediate()
	log := &testshop.CountingLog{}
	config := testwork.Config(t, s)
	config.Logger = slog.New(log)
	testwork.Work(t, config)
	testkit.Eventually(t, 30*time.Second, "the log names what the worker waits for", func() bool {
		return log.Times("cannot read the schema's version from Postgres, trying again") == 1
	})
	s.Restart(t, server)
	s.AwaitConfirmed(t, 1)
}

// A minute without Postgres shows defects that a short outage hides: deadlines that pass during the outage, deliveries
// that are counted, full readers.
func TestSaleSurvivesMinuteWithoutPostgres(t *testing.T) {
	t.Parallel()
	const (
		outageLength = time.Minute
		window       = 30 * time.Second // over in the middle of the outage
		perSecond    = 20
		buyersMin    = 500
	)
	s, server := testshop.OnOwnPostgres(t)
	sale, err := s.Catalog.Create(t.Context(), reservation.Terms{
		Name: "test", Stock: 5000, PerOrderLimit: 1,
		PaymentWindow: window,
	})
	require.NoError(t, err)
	ctx, stopHeartbeats := context.WithCancel(context.Background())
	var heartbeats sync.WaitGroup
	heartbeats.Go(func() { _ = ledger.Heartbeat{Pool: s.Pool, Logger: testkit.Logger(t)}.Run(ctx) }) // returns nil
	t.Cleanup(func() { stopHeartbeats(); heartbeats.Wait() })
	testwork.Work(t, testwork.Config(t, s))

	early := map[string]uuid.UUID{}
	for i := range 100 {
		user := fmt.Sprintf("early-%d", i)
		early[user] = s.Buy(t, sale.ID, user)
	}
	s.AwaitConfirmed(t, len(early))

	server.StopImmediate()
	stopped, late := time.Now(), 0
	for ; time.Since(stopped) < outageLength || late <= buyersMin; late++ {
		require.Less(t, time.Since(stopped), 3*outageLength, "buyers are served during the outage")
		s.Buy(t, sale.ID, fmt.Sprintf("late-%d", late))
		require.True(t, retry.Pause(time.Second/perSecond, t.Context().Done()))
	}

	s.Restart(t, server)
	s.AwaitConfirmed(t, len(early)+late) // within 30 s
	testwork.AwaitRest(t, s)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM dead_letters"))
	testkit.Eventually(t, testshop.Soon, "the next heartbeat records the outage, beside pauses of a busy machine", func() bool {
		return s.Count(t, "SELECT count(*) FROM outages WHERE ended_at - began_at > interval '30 seconds'") == 1
	})
	for user, o := range early {
		paid, err := ledger.New(s.Pool).Pay(t.Context(), o, user, "after the outage")
		require.NoError(t, err)
		require.Equal(t, order.StatusPaid, paid.Status)
	}
	require.Zero(t, s.Count(t, "SELECT count(*) FROM order_events WHERE type = 'OrderExpired'"))
	require.EqualValues(t, len(early)+late, testshop.Sold(t, s.Pool, sale.ID))
}

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

// A worker that cannot reach Postgres, and holds orders that it cannot record, does not keep the rest of its partition.
func TestWorkerWithoutPostgresIsReplaced(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	pool, err := connect.Postgres(t.Context(), testkit.DatabaseURL(t), 8)
	require.NoError(t, err)
	names := []string{"ann", "bob"}
	reads, registries := map[string]func() bool{}, map[string]*prometheus.Registry{}
	for _, name := range names {
		config, registry := testwork.Config(t, s), prometheus.NewRegistry()
		config.Consumer, config.Registerer, config.MinIdle = name, registry, 2*time.Second
		if name == stream.First(s.Keys.Orders(0), names) {
			config.Catalog = catalog.New(pool, s.Store)
		}
		testwork.Work(t, config)
		registries[name] = registry
		reads[name] = func() bool {
			return testshop.Metric(t, registry, "stampede_stream_readers", s.Keys.Orders(0)) == 1
		}
	}
	first := stream.First(s.Keys.Orders(0), names)
	other := names[0]
	if other == first {
		other = names[1]
	}
	testkit.Eventually(t, testshop.Soon, "the first one reads", func() bool { return reads[first]() && !reads[other]() })
	for name, series := range map[string]string{
		first: `{idle=""} 1`, other: `{idle="others read all partitions: ` + first + `"} 0`,
	} {
		testkit.Eventually(t, testshop.Soon, name+" says why", func() bool {
			return testutil.GatherAndCompare(registries[name], strings.NewReader(
				"# HELP stampede_worker_partitions Partitions that this worker reads; the label idle says why it reads none.\n"+
					"# TYPE stampede_worker_partitions gauge\nstampede_worker_partitions"+series+"\n"),
				"stampede_worker_partitions") == nil
		})
	}
	pool.Close()
	testkit.Eventually(t, testshop.Soon, "the other one reads", reads[other])
	require.True(t, reads[first](), "a worker that cannot look keeps what it reads")
}

// Two workers with one name deliver each other's pending entries, and each takes the other for itself.
func TestWorkersWithOneNameAreTrouble(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	failing := func(registry *prometheus.Registry) float64 {
		return testshop.Metric(t, registry, "stampede_worker_failing", metrics.StepName)
	}
	var registries []*prometheus.Registry
	var stop func()
	for range 2 {
		config, registry := testwork.Config(t, s), prometheus.NewRegistry()
		config.Consumer, config.Registerer, config.MinIdle = "ann", registry, 2*time.Second
		registries = append(registries, registry)
		stop = testwork.Work(t, config)
	}
	for _, registry := range registries {
		testkit.Eventually(t, testshop.Soon, "a trouble", func() bool { return failing(registry) == 1 })
	}
	stop()
	testkit.Eventually(t, testshop.Soon, "the other is alone", func() bool { return failing(registries[0]) == 0 })
}

func TestWorkersKeepTheirPartitionsWithoutRedis(t *testing.T) {
	t.Parallel()
	const partitions = 8
	server := testkit.OwnRedis(t)
	keys := testkit.Keys(t)
	keys.Partitions = partitions
	s := testshop.NewShopOn(t, testshop.Options{RedisURL: server.URL, Keys: keys})
	s.Open(t, 10)
	names := []string{"ann", "bob"}
	registries, logs := map[string]*prometheus.Registry{}, map[string]*testshop.CountingLog{}
	for _, name := range names {
		config := testwork.Config(t, s)
		registries[name], logs[name] = prometheus.NewRegistry(), &testshop.CountingLog{}
		config.Consumer, config.Registerer, config.Logger = name, registries[name], slog.New(logs[name])
		config.MinIdle = time.Second
		testwork.Work(t, config)
	}
	// read returns the readers, a letter for each partition.
	read := func() (readers string) {
		for p := range partitions {
			for _, name := range names {
				if testshop.Metric(t, registries[name], "stampede_stream_readers", keys.Orders(p)) == 1 {
					readers += name[:1]
				}
			}
			readers += fmt.Sprint(p)
		}
		return readers
	}
	var shared string
	for p := range partitions {
		shared += stream.First(keys.Orders(p), names)[:1] + fmt.Sprint(p)
	}
	testkit.Eventually(t, testshop.Soon, "each partition has one reader", func() bool { return read() == shared })
	require.Contains(t, shared, "a")
	require.Contains(t, shared, "b")

	server.Kill()
	for _, name := range names {
		testkit.Eventually(t, testshop.Soon, name+" cannot look", func() bool {
			return logs[name].Times("cannot look for the other workers, trying again") == 1
		})
	}
	require.Equal(t, shared, read())
	require.NoError(t, server.Restart(t.Context()))
	for _, name := range names {
		testkit.Eventually(t, testshop.Soon, name+" can look again", func() bool {
			return logs[name].Times("can look for the other workers again") == 1
		})
	}
	testkit.Eventually(t, testshop.Soon, "each partition has one reader again", func() bool { return read() == shared })
}
