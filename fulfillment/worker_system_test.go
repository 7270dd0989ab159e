//go:build system

package fulfillment_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
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
