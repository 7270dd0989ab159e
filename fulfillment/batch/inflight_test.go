package batch_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/lock"
	"stampede/stream"
)

func TestBatcherRunsAtMostTwoTransactions(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 31)
	msgs := testwork.Messages(t, s)
	b := testwork.Batch(t, s, func(c *batch.Config) { c.BatchMax = 10 })
	hold := s.HoldSale(t, sale)

	answers := testwork.Handle(b, msgs[0])
	s.AwaitWaiting(t, 1)
	answers = append(answers, testwork.Handle(b, msgs[1:10]...)...)
	testkit.Eventually(t, testshop.Soon, "nine messages wait for a tenth", func() bool { return b.Queued() == 9 })
	require.EqualValues(t, 1, testshop.TransactionsWaiting(t, s.Pool))
	answers = append(answers, testwork.Handle(b, msgs[10])...)
	testkit.Eventually(t, testshop.Soon, "the second transaction is running",
		func() bool { return testshop.TransactionsWaiting(t, s.Pool) == 2 && b.Queued() == 0 })
	answers = append(answers, testwork.Handle(b, msgs[11:]...)...)
	testkit.Eventually(t, testshop.Soon, "two full batches wait", func() bool { return b.Queued() == 20 })
	require.EqualValues(t, 2, testshop.TransactionsWaiting(t, s.Pool))

	require.NoError(t, hold.Rollback(t.Context()))
	testwork.RequireDone(t, answers)
	require.EqualValues(t, 4, s.Count(t, "SELECT count(DISTINCT updated_at) FROM orders"),
		"one order, and three batches of ten")
	require.EqualValues(t, 31, s.Count(t, testshop.ConfirmedOrders))
	require.EqualValues(t, 31, testshop.Sold(t, s.Pool, sale))
}

// The batcher also separates the orders of a user without the locks in Redis.
func TestBatcherKeepsUserOutOfSecondTransaction(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	slow, fast := s.Open(t, 100), s.Open(t, 100)
	s.Buy(t, slow, "ann")
	s.Buy(t, fast, "ann")
	for i := range 9 {
		s.Buy(t, fast, fmt.Sprint("user-", i))
	}
	msgs := testwork.Messages(t, s)
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = gone.Close() })
	b := testwork.Batch(t, s, func(c *batch.Config) { c.BatchMax, c.Locker = 10, lock.New(gone) })
	hold := s.HoldSale(t, slow)

	first := testwork.Handle(b, msgs[0])
	s.AwaitWaiting(t, 1)
	others := testwork.Handle(b, msgs[1:]...)
	for _, a := range others[1:] {
		require.NoError(t, testshop.Answer(t, a), "an order of another user")
	}
	require.EqualValues(t, 9, testshop.Sold(t, s.Pool, fast))
	require.Empty(t, others[0], "the order waits for the other order of its user")
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, testshop.Answer(t, first[0]))
	require.NoError(t, testshop.Answer(t, others[0]))
	require.EqualValues(t, 10, testshop.Sold(t, s.Pool, fast))
}

func TestBatcherDrainWaitsForInFlightBatches(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 100)
	s.Crowd(t, sale, 12)
	msgs := testwork.Messages(t, s)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	b := testwork.Batcher(t, s, func(c *batch.Config) { c.BatchMax = 5 })
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	hold := s.HoldSale(t, sale)
	answers := testwork.Handle(b, msgs[0])
	s.AwaitWaiting(t, 1)
	answers = append(answers, testwork.Handle(b, msgs[1:6]...)...)
	s.AwaitWaiting(t, 2)
	answers = append(answers, testwork.Handle(b, msgs[6:]...)...)
	testkit.Eventually(t, testshop.Soon, "the other messages wait", func() bool { return b.Queued() == 6 })

	b.Drain()
	require.Empty(t, ended, "Run waits for the batches")
	require.NoError(t, hold.Rollback(t.Context()))
	testwork.RequireDone(t, answers, "running batches and queued messages are finished")
	stop()
	require.NoError(t, testshop.Answer(t, ended))
	require.ErrorIs(t, b.Handle(msgs[0]), stream.ErrStopping)
}

func TestBatcherStopLeavesInFlightAndDeferredMessages(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	one, other := s.Open(t, 10), s.Open(t, 10)
	s.Buy(t, one, "ann")
	s.Buy(t, other, "ann")
	msgs := testwork.Messages(t, s)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	b := testwork.Batcher(t, s, func(c *batch.Config) { c.BatchMax = 1 })
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	s.HoldSale(t, one)
	answers := testwork.Handle(b, msgs[0])
	s.AwaitWaiting(t, 1)
	later, accepted := b.Submit(msgs[1])
	require.True(t, accepted)
	answers = append(answers, later)
	testkit.Eventually(t, testshop.Soon, "the other message is deferred, not left in the queue",
		func() bool { return b.Queued() == 0 })

	stop()
	require.NoError(t, testshop.Answer(t, ended))
	testwork.RequireAllFail(t, answers, stream.ErrStopping)
	require.Zero(t, s.Count(t, "SELECT count(*) FROM order_events"))
}
