package batch_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
)

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
		ReservedAt: late.ReservedAt, UpdatedAt: o.UpdatedAt, Reason: order.VoidedSaleRebuilt,
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
