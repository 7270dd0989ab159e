package testwork

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/fulfillment/metrics"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/lock"
	"stampede/reservation/order"
	"stampede/stream"
)

// Batcher makes a batcher of the shop; change, if not nil, alters its configuration.
func Batcher(s *testshop.Shop, t testing.TB, change func(*batch.Config)) *batch.Batcher {
	t.Helper()
	m, err := metrics.New(nil)
	require.NoError(t, err)
	config := batch.Config{
		// Tests lock rows for a long time.
		Ledger: ledger.New(s.Pool).WithLockTimeout(time.Minute), Store: s.Store, Locker: lock.New(s.Rdb),
		Keys: s.Keys, BatchMax: 500, Lease: 10 * time.Second,
		Logger: testkit.Logger(t), Metrics: m,
	}
	if change != nil {
		change(&config)
	}
	t.Cleanup(func() {
		closing, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		_ = config.Locker.Close(closing) // some tests have stopped Redis
	})
	return batch.New(config)
}

// Batch makes a batcher, and runs it until the test ends.
func Batch(s *testshop.Shop, t testing.TB, change func(*batch.Config)) *batch.Batcher {
	t.Helper()
	b := Batcher(s, t, change)
	RunBatcher(t, b)
	return b
}

// RunBatcher runs a batcher until the test ends.
func RunBatcher(t testing.TB, b *batch.Batcher) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, testshop.Answer(t, ended), "Run")
	})
}

// Events are the orders in the stream.
func Events(s *testshop.Shop, t testing.TB) []order.OrderReserved {
	t.Helper()
	return EventsIn(s, t, 0)
}

// EventsIn are the orders in the stream of a partition.
func EventsIn(s *testshop.Shop, t testing.TB, partition int) []order.OrderReserved {
	t.Helper()
	return eventsIn(t, s.Rdb.XRange(t.Context(), s.Keys.Orders(partition), "-", "+").Val())
}

func eventsIn(t testing.TB, entries []redis.XMessage) (events []order.OrderReserved) {
	t.Helper()
	for _, entry := range entries {
		msg, err := stream.DecodeEntry(entry.ID, entry.Values, 1)
		require.NoError(t, err)
		held, err := order.DecodeReserved(msg)
		require.NoError(t, err)
		events = append(events, held...)
	}
	return events
}

// messageOf is a message with these orders of one sale, as a subscriber delivers it.
func messageOf(t testing.TB, events ...order.OrderReserved) *message.Message {
	t.Helper()
	msg, err := stream.DecodeEntry("1-1", stream.Values(events...), 1)
	require.NoError(t, err)
	return msg
}

// Messages has a message of its own for each order in the stream.
func Messages(s *testshop.Shop, t testing.TB) (all []*message.Message) {
	t.Helper()
	for _, event := range Events(s, t) {
		all = append(all, messageOf(t, event))
	}
	return all
}

// Handle passes messages to the batcher as the Router would, and returns channels for the results.
func Handle(b *batch.Batcher, msgs ...*message.Message) []chan error {
	answers := make([]chan error, len(msgs))
	for i, msg := range msgs {
		answers[i] = make(chan error, 1)
		go func() { answers[i] <- b.Handle(msg) }()
	}
	return answers
}
