package fulfillment_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment"
	"stampede/internal/testkit"
	"stampede/lock"
)

// holdSale keeps every transaction of the sale from its end, until the returned one is rolled back.
func (s *shop) holdSale(t testing.TB, sale uuid.UUID) pgx.Tx {
	t.Helper()
	hold, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = hold.Rollback(context.WithoutCancel(t.Context())) })
	_, err = hold.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR UPDATE", sale)
	require.NoError(t, err)
	return hold
}

// transactionsWaiting is how many transactions wait for a lock.
func (s *shop) transactionsWaiting(t testing.TB) int64 {
	t.Helper()
	return s.count(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
}

func TestBatcherRunsAtMostTwoTransactions(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 100)
	s.crowd(t, sale, 31)
	msgs := s.messages(t)
	b := s.batch(t, func(c *fulfillment.BatcherConfig) { c.BatchMax = 10 })
	hold := s.holdSale(t, sale)

	answers := handle(b, msgs[0])
	testkit.Eventually(t, soon, "the first one is under way", func() bool { return s.transactionsWaiting(t) == 1 })
	answers = append(answers, handle(b, msgs[1:10]...)...)
	testkit.Eventually(t, soon, "nine wait for a tenth", func() bool { return queued(b) == 9 })
	require.EqualValues(t, 1, s.transactionsWaiting(t))
	answers = append(answers, handle(b, msgs[10])...)
	testkit.Eventually(t, soon, "the second one is under way", func() bool { return s.transactionsWaiting(t) == 2 && queued(b) == 0 })
	answers = append(answers, handle(b, msgs[11:]...)...)
	testkit.Eventually(t, soon, "two full batches wait", func() bool { return queued(b) == 20 })
	require.EqualValues(t, 2, s.transactionsWaiting(t))

	require.NoError(t, hold.Rollback(t.Context()))
	for _, a := range answers {
		require.NoError(t, answer(t, a))
	}
	require.EqualValues(t, 4, s.count(t, "SELECT count(DISTINCT updated_at) FROM orders"), "one order, and three times ten")
	require.EqualValues(t, 31, s.count(t, confirmedOrders))
	require.EqualValues(t, 31, soldOf(t, s.pool, sale))
}

// Also without Redis, whose locks see to the same.
func TestBatcherKeepsUserOutOfSecondTransaction(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	slow, fast := s.open(t, 100), s.open(t, 100)
	s.buy(t, slow, "ann")
	s.buy(t, fast, "ann")
	for i := range 9 {
		s.buy(t, fast, fmt.Sprint("user-", i))
	}
	msgs := s.messages(t)
	gone := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = gone.Close() })
	b := s.batch(t, func(c *fulfillment.BatcherConfig) { c.BatchMax, c.Locker = 10, lock.New(gone) })
	hold := s.holdSale(t, slow)

	first := handle(b, msgs[0])
	testkit.Eventually(t, soon, "the first one is under way", func() bool { return s.transactionsWaiting(t) == 1 })
	others := handle(b, msgs[1:]...)
	for _, a := range others[1:] {
		require.NoError(t, answer(t, a), "of another user")
	}
	require.EqualValues(t, 9, soldOf(t, s.pool, fast))
	require.Empty(t, others[0], "it waits for the other order of its user")
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, answer(t, first[0]))
	require.NoError(t, answer(t, others[0]))
	require.EqualValues(t, 10, soldOf(t, s.pool, fast))
}

func TestBatcherDrainWaitsForInFlightBatches(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	sale := s.open(t, 100)
	s.crowd(t, sale, 12)
	msgs := s.messages(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	b := s.batcher(t, func(c *fulfillment.BatcherConfig) { c.BatchMax = 5 })
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	hold := s.holdSale(t, sale)
	answers := handle(b, msgs[0])
	testkit.Eventually(t, soon, "the first one is under way", func() bool { return s.transactionsWaiting(t) == 1 })
	answers = append(answers, handle(b, msgs[1:6]...)...)
	testkit.Eventually(t, soon, "and a second one", func() bool { return s.transactionsWaiting(t) == 2 })
	answers = append(answers, handle(b, msgs[6:]...)...)
	testkit.Eventually(t, soon, "the rest waits", func() bool { return queued(b) == 6 })

	b.Drain()
	require.Empty(t, ended, "it drains")
	require.NoError(t, hold.Rollback(t.Context()))
	for _, a := range answers {
		require.NoError(t, answer(t, a), "what can be finished is finished")
	}
	stop()
	require.NoError(t, answer(t, ended))
	require.ErrorIs(t, b.Handle(msgs[0]), fulfillment.ErrStopping)
}

func TestBatcherStopLeavesInFlightAndDeferredMessages(t *testing.T) {
	t.Parallel()
	s := newShop(t, testkit.Pool(t))
	one, other := s.open(t, 10), s.open(t, 10)
	s.buy(t, one, "ann")
	s.buy(t, other, "ann")
	msgs := s.messages(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	b := s.batcher(t, func(c *fulfillment.BatcherConfig) { c.BatchMax = 1 })
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	s.holdSale(t, one)
	answers := handle(b, msgs[0])
	testkit.Eventually(t, soon, "one order is under way", func() bool { return s.transactionsWaiting(t) == 1 })
	later := &fulfillment.Submission{Msg: msgs[1], Done: make(chan error, 1)}
	require.True(t, b.Queue.Add(later))
	answers = append(answers, later.Done)
	testkit.Eventually(t, soon, "the other one is put off, not left in the queue", func() bool { return queued(b) == 0 })

	stop()
	require.NoError(t, answer(t, ended))
	for _, a := range answers {
		require.ErrorIs(t, answer(t, a), fulfillment.ErrStopping)
	}
	require.Zero(t, s.count(t, "SELECT count(*) FROM order_events"))
}
