package designs

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"stampede/bench/front"
	"stampede/internal/test/testkit"
)

func TestMemoryQueueIsLostWithProcess(t *testing.T) {
	t.Parallel()
	const accepted = 10
	s := newSale(t, 100, All["memory-queue"].Guarded)
	process := s.start(t, "memory-queue")
	unblock := s.blockWrites(t)
	process.buyTimes(t, accepted)
	process.Kill()
	unblock()

	process = s.start(t, "memory-queue")
	require.Equal(t, http.StatusConflict, process.buy(t, "user-9"), "Redis says that this buyer has an order")
	require.Equal(t, http.StatusAccepted, process.buy(t, "late"))
	testkit.Eventually(t, timeout, "the order after the restart", func() bool {
		var there bool
		require.NoError(t, s.pool.QueryRow(t.Context(),
			"SELECT EXISTS (SELECT FROM orders WHERE user_id = 'late')").Scan(&there))
		return there
	})
	// Postgres may have received one of them before the kill.
	require.LessOrEqual(t, s.orders(t), 1+1, "orders in Postgres, of %d that were accepted", accepted+1)
}

func TestMemoryQueueIsWrittenOnShutdown(t *testing.T) {
	t.Parallel()
	s := newSale(t, 100, All["memory-queue"].Guarded)
	process := s.start(t, "memory-queue")
	unblock := s.blockWrites(t)
	process.buyTimes(t, 10)
	require.Zero(t, s.orders(t))
	unblock()
	require.True(t, process.Stop().Success())
	require.Equal(t, 10, s.orders(t))
}

func TestMemoryQueueSurvivesPostgresOutage(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, All["memory-queue"].Guarded)
	d := openDesign[*memoryQueue](t, s, newMemoryQueue)
	unblock := s.blockWrites(t)
	run(t, d)
	require.Equal(t, front.Reserved, s.buy(t, d, "alice"))
	require.Equal(t, front.Reserved, s.buy(t, d, "bob"))
	testkit.Eventually(t, timeout, "the termination of the connection that waits to write", func() bool {
		var ended bool
		require.NoError(t, s.pool.QueryRow(t.Context(), `
			SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&ended))
		return ended
	})
	unblock()
	s.requireOrders(t, 2)
}

func TestMemoryQueueDropsOrderThatPostgresRejects(t *testing.T) {
	t.Parallel()
	s := newSale(t, 10, All["memory-queue"].Guarded)
	d := openDesign[*memoryQueue](t, s, newMemoryQueue)
	run(t, d)
	require.Equal(t, front.Reserved, s.buy(t, d, "\xff is not UTF-8"))
	require.Equal(t, front.Reserved, s.buy(t, d, "bob"))
	s.requireOrders(t, 1)
}

func TestStreamKeepsAcceptedOrdersAfterKill(t *testing.T) {
	t.Parallel()
	const accepted = 2 * stockSubscribers // some are being written, and some are not read yet
	s := newSale(t, 100, All["stock-stream"].Guarded)
	s.backend.Options = map[string]string{"max-idle-ms": "500"}
	process := s.start(t, "stock-stream")
	unblock := s.blockWrites(t)
	process.buyTimes(t, accepted)
	process.Kill()
	unblock()
	process = s.start(t, "stock-stream")
	require.Equal(t, http.StatusConflict, process.buy(t, "user-0"))
	testkit.Eventually(t, stockClaimDelay+timeout, "all accepted orders",
		func() bool { return s.orders(t) == accepted })
	pending := func() bool {
		p, err := s.rdb.XPending(t.Context(), s.backend.Prefix+":orders", stockGroup).Result()
		require.NoError(t, err)
		return p.Count == 0
	}
	testkit.Eventually(t, timeout, "all acks", pending)
	require.Equal(t, accepted, s.orders(t), "orders after all deliveries")
}

func TestScriptAppendsSameEntryAsStockPublisher(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["stock-stream"].Guarded)
	d := openDesign[*stockStream](t, s, newStockStream)
	o := s.order("alice")
	verdict, err := d.Buy(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, front.Reserved, verdict)

	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: testkit.Redis(t)},
		watermill.NopLogger{})
	require.NoError(t, err)
	payload, err := json.Marshal(streamOrder{Sale: o.Sale, User: o.User, Quantity: o.Quantity})
	require.NoError(t, err)
	require.NoError(t, publisher.Publish(d.streamKey(), message.NewMessage(o.ID.String(), payload)))

	entries, err := s.rdb.XRange(t.Context(), d.streamKey(), "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, entries[1].Values, entries[0].Values)
}
