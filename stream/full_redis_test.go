package stream_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/stream"
)

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
