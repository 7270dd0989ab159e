//go:build system

package fulfillment_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/metrics"
	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/stream"
)

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
			config.Pool = pool
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
