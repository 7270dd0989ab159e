package stream_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/stream"
)

// A full Redis gets room only from workers, so they must be able to start while it is full.
func TestWorkerDrainsFullRedis(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	sale := s.Open(t, 5)
	for _, user := range []string{"ann", "bob", "cid", "dan", "eve"} {
		s.Buy(t, sale, user)
	}
	_, err := s.Pool.Exec(t.Context(), "UPDATE sales SET stock = 4 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, stream.CreateGroup(t.Context(), s.Rdb, s.Keys.Orders(0), reservation.Group))
	require.NoError(t, s.Rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	require.ErrorContains(t, s.Rdb.Set(t.Context(), "some", "thing", 0).Err(), "OOM")

	testwork.Work(t, testwork.Config(t, s))
	s.AwaitConfirmed(t, 4)
	testwork.AwaitRest(t, s)
	require.Equal(t, "1", s.Rdb.HGet(t.Context(), s.Keys.Sale(0, sale), "left").Val(),
		"the rejected order's unit is released")
}

func TestSubscriberCreatesGroupOnceFullRedisHasRoom(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	uuids := b.publish(1)
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "1").Err())
	log := &testshop.CountingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	testkit.Eventually(t, testshop.Soon, "the error is logged", func() bool { return log.Times(cannotRead) == 1 })
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "0").Err())
	require.Equal(t, uuids, receiveUUIDs(t, messages, 1))
	b.awaitNonePending()
}

func TestSubscriberCreatesGroupOncePerOutage(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	log := &testshop.CountingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	b.publish(1)
	receive(t, messages).Ack()
	for lost := 1; lost <= 3; lost++ {
		testkit.Eventually(t, testshop.Soon, "a read is interrupted", func() bool {
			require.NoError(t, b.rdb.ClientKillByFilter(b.ctx, "TYPE", "normal").Err())
			return log.Times(cannotRead) >= lost
		})
		uuids := b.publish(1)
		require.Equal(t, uuids, receiveUUIDs(t, messages, 1))
	}
	b.awaitNonePending()
	for line := range strings.Lines(b.rdb.Info(b.ctx, "commandstats").Val()) {
		if strings.HasPrefix(line, "cmdstat_xgroup|create:") {
			require.Contains(t, line, ":calls=1,")
			return
		}
	}
	t.Fatal("the group was never created")
}

func withLog(log slog.Handler) func(*stream.Config) {
	return func(c *stream.Config) { c.Logger = slog.New(log) }
}

// cannotRead is what a subscriber logs at the first of several failures in a row.
const cannotRead = "cannot read the stream, trying again"
