package fulfillment_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/reservation"
)

// What fills Redis is what workers drain: they must be able to start while it is full.
func TestWorkerDrainsFullRedis(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	s := newShopOn(t, testkit.Pool(t), server.URL, reservation.Keys{Prefix: "test", Partitions: 1})
	sale := s.open(t, 5)
	for _, user := range []string{"ann", "bob", "cid", "dan", "eve"} {
		s.buy(t, sale, user)
	}
	_, err := s.pool.Exec(t.Context(), "UPDATE sales SET stock = 4 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, fulfillment.CreateGroup(t.Context(), s.rdb, s.keys.Orders(0), reservation.Group))
	require.NoError(t, s.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	require.ErrorContains(t, s.rdb.Set(t.Context(), "some", "thing", 0).Err(), "OOM")

	work(t, s.config(t))
	s.awaitConfirmed(t, 4)
	s.awaitRest(t)
	require.Equal(t, "1", s.rdb.HGet(t.Context(), s.keys.Sale(0, sale), "left").Val(), "the rejected order's unit is back")
}

func TestSubscriberCreatesGroupOnceFullRedisHasRoom(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	uuids := b.publish(1)
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "1").Err())
	log := &countingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	testkit.Eventually(t, soon, "it says what it waits for", func() bool { return log.times(cannotRead) == 1 })
	require.NoError(t, b.rdb.ConfigSet(b.ctx, "maxmemory", "0").Err())
	require.Equal(t, uuids, receiveUUIDs(t, messages, 1))
	b.awaitNonePending()
}

func TestSubscriberCreatesGroupOncePerOutage(t *testing.T) {
	t.Parallel()
	server := testkit.OwnRedis(t)
	b := newStreamBenchAt(t, server.URL, "orders")
	log := &countingLog{}
	messages := b.subscribe(b.subscriber("worker-1", withLog(log)))
	b.publish(1)
	receive(t, messages).Ack()
	for lost := 1; lost <= 3; lost++ {
		testkit.Eventually(t, soon, "a read is broken off", func() bool {
			require.NoError(t, b.rdb.ClientKillByFilter(b.ctx, "TYPE", "normal").Err())
			return log.times(cannotRead) >= lost
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
	t.Fatal("the group was never made")
}

func withLog(log slog.Handler) func(*fulfillment.SubscriberConfig) {
	return func(c *fulfillment.SubscriberConfig) { c.Logger = slog.New(log) }
}

// cannotRead is what a subscriber says at the first of a run of failures.
const cannotRead = "cannot read the stream, trying again"
