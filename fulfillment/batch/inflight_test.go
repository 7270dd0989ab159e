package batch_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/lock"
	"stampede/reservation/order"
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

func TestLedgerVoidsOrdersOfOlderEpoch(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale, other := testshop.NewSale(t, pool, 10), testshop.NewSale(t, pool, 10)
	early := testshop.Reserved(sale, "alice", 1)
	testwork.Record(t, l, []order.OrderReserved{early})
	testshop.RaiseEpoch(t, pool, sale)
	late, current, elsewhere := testshop.Reserved(sale, "bob", 2), testshop.Reserved(sale, "carol", 2),
		testshop.Reserved(other, "dave", 1)
	current.Epoch = 2

	for _, fresh := range []bool{true, false} {
		outcomes := testwork.Record(t, l, []order.OrderReserved{early, late, current, elsewhere})
		require.Equal(t, []ledger.Outcome{
			{Event: early, Status: order.StatusConfirmed},
			{Event: late, Status: order.StatusVoided, Reason: order.VoidedSaleRebuilt, Fresh: fresh},
			{Event: current, Status: order.StatusConfirmed, Fresh: fresh},
			{Event: elsewhere, Status: order.StatusConfirmed, Fresh: fresh},
		}, outcomes)
	}
	o, err := l.Order(t.Context(), late.OrderID)
	require.NoError(t, err)
	require.NotZero(t, o.UpdatedAt)
	require.Equal(t, order.Order{
		ID: late.OrderID, SaleID: sale, UserID: "bob", Quantity: 1, Status: order.StatusVoided, Version: 2,
		ReservedAt: late.ReservedAt, UpdatedAt: o.UpdatedAt, Reason: order.VoidedSaleRebuilt, Kind: order.KindOrder,
	}, o)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderVoided"}, testshop.History(t, pool, late.OrderID))
	require.EqualValues(t, 2, testshop.Sold(t, pool, sale))
	require.EqualValues(t, 1, testshop.Sold(t, pool, other))
	require.EqualValues(t, 2, testshop.QueryInt(t, pool, "SELECT last_sequence FROM sales WHERE id = $1", sale))

	// The buyer of a voided order can order again, and an operator can reject an order of the old epoch.
	again := testshop.Reserved(sale, "bob", 3)
	again.Epoch = 2
	outcomes := testwork.Record(t, l, []order.OrderReserved{again})
	require.Equal(t, order.StatusConfirmed, outcomes[0].Status)
	refused := testshop.Reserved(sale, "erin", 4)
	outcomes, err = l.Refuse(t.Context(), []order.OrderReserved{refused}, deadletter.RejectedDiscarded)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
}

// The epoch is raised after the orders were found to be of it, and before they are counted: they are
// decided again.
func TestLedgerConfirmsNothingInEndedEpoch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	sale, other := testshop.NewSale(t, s.Pool, 10), testshop.NewSale(t, s.Pool, 10)
	events := append(testshop.ReservedCrowd(sale, 2), testshop.ReservedCrowd(other, 2)...)
	log := &testshop.CountingLog{}
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Logger = slog.New(log) })

	rebuilder, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = rebuilder.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = rebuilder.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR NO KEY UPDATE", sale)
	require.NoError(t, err)
	var answers []chan error
	var deferred int
	done := make(chan struct{})
	go func() {
		defer close(done)
		answers, deferred = b.ProcessBatch(t.Context(), events...)
	}()
	s.AwaitWaiting(t, 1)
	_, err = rebuilder.Exec(t.Context(), "UPDATE sales SET epoch = 2 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, rebuilder.Commit(t.Context()))

	<-done
	require.Zero(t, deferred)
	for i, a := range answers {
		require.NoError(t, testshop.Answer(t, a), "the message is acknowledged")
		want := "2 OrderVoided"
		if events[i].SaleID == other {
			want = "2 OrderConfirmed"
		}
		require.Equal(t, []string{"1 OrderReserved", want}, testshop.History(t, s.Pool, events[i].OrderID))
	}
	require.Zero(t, testshop.Sold(t, s.Pool, sale))
	require.EqualValues(t, 2, testshop.Sold(t, s.Pool, other))
	require.EqualValues(t, 2,
		s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided' AND reason = 'sale-rebuilt'"))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("voided")))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("confirmed")))
	require.Zero(t, log.Times("cannot record orders in Postgres, trying again"), "an ended epoch is no outage")

	// A redelivery changes nothing.
	answers, deferred = b.ProcessBatch(t.Context(), events[0])
	require.Zero(t, deferred)
	require.NoError(t, testshop.Answer(t, answers[0]))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("voided")))
	require.Zero(t, testshop.Sold(t, s.Pool, sale))
}

// The units of a voided order were not counted when the sale was rebuilt, so they are not released.
func TestVoidedOrderReleasesNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "alice")
	msgs := testwork.Messages(t, s)
	testshop.RaiseEpoch(t, s.Pool, sale)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "epoch", 2).Err())
	b := testwork.Batch(t, s, nil)
	testwork.RequireDone(t, testwork.Handle(b, msgs...))
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided'"))
	require.EqualValues(t, 9, s.Left(t, sale), "the unit of this reservation is not released")
	require.True(t, s.Rdb.HExists(t.Context(), s.Keys.Buyers(0, sale), "alice").Val())
}

// A batch with orders of several traces: each trace has its order, and the first one the batch, with links both ways.
func TestBatchOfSeveralTraces(t *testing.T) {
	tracer, collector := testkit.Tracer(t)
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	parent := func(n int) string { return fmt.Sprintf("00-%032x-00f067aa0ba902b7-01", n) }
	for i := range 4 {
		s.Buy(t, sale, fmt.Sprint("user-", i))
	}
	events := s.Events(t, 0)
	for i := range events[:3] {
		events[i].TraceParent = parent(i + 1)
	}
	b := testwork.Batch(t, s, func(c *batch.Config) { c.Tracer = tracer })
	message, err := stream.DecodeEntry("7-1", stream.Values(events...), 1)
	require.NoError(t, err)
	require.NoError(t, b.Handle(message))
	recorded := func() int { return len(collector.Named("", "record order")) }
	testkit.Eventually(t, 30*time.Second, "the spans", func() bool { return recorded() == 3 })

	orders := collector.Named("", "record order")
	made := collector.Named("", "batch")
	require.Len(t, made, 1)
	require.Equal(t, "4", made[0].Attributes["messaging.batch.message_count"])
	require.Len(t, made[0].Links, 2)
	for _, span := range orders {
		require.Equal(t, "00f067aa0ba902b7", span.Parent)
		require.Equal(t, "7-1", span.Attributes["messaging.message.id"])
		if span.ID == made[0].Parent {
			require.Empty(t, span.Links)
			continue
		}
		require.Equal(t, []string{made[0].TraceParent()}, span.Links)
		require.Contains(t, made[0].Links, span.TraceParent())
	}
	noted := map[string]string{}
	rows, err := s.Pool.Query(t.Context(),
		"SELECT order_id::text, data ->> 'traceparent' FROM order_events WHERE data ? 'traceparent'")
	require.NoError(t, err)
	for rows.Next() {
		var id, text string
		require.NoError(t, rows.Scan(&id, &text))
		noted[id] = text
	}
	require.NoError(t, rows.Err())
	require.Len(t, noted, 3, "the fourth has none")
	for _, span := range orders {
		require.Equal(t, span.TraceParent(), noted[span.Attributes["stampede.order_id"]])
	}

	// A repeat, and a refusal of a traced order.
	require.NoError(t, b.Handle(message.Copy()))
	again := events[0]
	again.OrderID, again.Sequence = order.NewOrderID(sale), 9
	refused, err := stream.DecodeEntry("7-2", stream.Values(again), 1)
	require.NoError(t, err)
	require.NoError(t, b.Handle(refused))
	testkit.Eventually(t, 30*time.Second, "the spans", func() bool { return recorded() == 7 })
	var text string
	require.NoError(t, s.Pool.QueryRow(t.Context(),
		"SELECT data ->> 'traceparent' FROM order_events WHERE type = 'OrderRejected'").Scan(&text))
	rejected := collector.Named("", "record order")[6]
	require.Equal(t, rejected.TraceParent(), text)
	require.Equal(t, "rejected", rejected.Attributes["stampede.status"])
}
