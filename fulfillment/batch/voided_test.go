package batch_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/fulfillment/deadletter"
	"stampede/fulfillment/ledger"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation/order"
)

func TestLedgerVoidsOrdersOfOlderEpoch(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	l := ledger.New(pool)
	sale, other := testshop.NewSale(t, pool, 10), testshop.NewSale(t, pool, 10)
	early := testshop.Reserved(sale, "alice", 1)
	_, err := l.Record(t.Context(), []order.OrderReserved{early})
	require.NoError(t, err)
	testshop.RaiseEpoch(t, pool, sale)
	late, ofToday, elsewhere := testshop.Reserved(sale, "bob", 2), testshop.Reserved(sale, "carol", 2),
		testshop.Reserved(other, "dave", 1)
	ofToday.Epoch = 2

	for _, fresh := range []bool{true, false} {
		outcomes, err := l.Record(t.Context(), []order.OrderReserved{early, late, ofToday, elsewhere})
		require.NoError(t, err)
		require.Equal(t, []ledger.Outcome{
			{Event: early, Status: order.StatusConfirmed},
			{Event: late, Status: order.StatusVoided, Reason: order.VoidedSaleRebuilt, Fresh: fresh},
			{Event: ofToday, Status: order.StatusConfirmed, Fresh: fresh},
			{Event: elsewhere, Status: order.StatusConfirmed, Fresh: fresh},
		}, outcomes)
	}
	o, err := l.Order(t.Context(), late.OrderID)
	require.NoError(t, err)
	require.Equal(t, order.Order{
		ID: late.OrderID, SaleID: sale, UserID: "bob", Quantity: 1, Status: order.StatusVoided, Version: 2,
		ReservedAt: late.ReservedAt, Reason: order.VoidedSaleRebuilt,
	}, o)
	require.Equal(t, []string{"1 OrderReserved", "2 OrderVoided"}, testshop.History(t, pool, late.OrderID))
	require.EqualValues(t, 2, testshop.SoldOf(t, pool, sale))
	require.EqualValues(t, 1, testshop.SoldOf(t, pool, other))
	require.EqualValues(t, 2, testshop.QueryInt(t, pool, "SELECT last_sequence FROM sales WHERE id = $1", sale))

	// Its buyer can have another order, and an operator who refuses it says so and not something else.
	again := testshop.Reserved(sale, "bob", 3)
	again.Epoch = 2
	outcomes, err := l.Record(t.Context(), []order.OrderReserved{again})
	require.NoError(t, err)
	require.Equal(t, order.StatusConfirmed, outcomes[0].Status)
	refused := testshop.Reserved(sale, "erin", 4)
	outcomes, err = l.Refuse(t.Context(), []order.OrderReserved{refused}, deadletter.RejectedDiscarded)
	require.NoError(t, err)
	require.Equal(t, order.StatusRejected, outcomes[0].Status)
}

// The epoch is raised after it was decided that the orders are of it, and before they are counted: they
// are decided again.
func TestLedgerConfirmsNothingInEndedEpoch(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	sale, other := testshop.NewSale(t, s.Pool, 10), testshop.NewSale(t, s.Pool, 10)
	events := append(testshop.CrowdOf(sale, 2), testshop.CrowdOf(other, 2)...)
	log := &testshop.CountingLog{}
	b := testwork.Batch(s, t, func(c *batch.Config) { c.Logger = slog.New(log) })

	rebuilder, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = rebuilder.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = rebuilder.Exec(t.Context(), "SELECT FROM sales WHERE id = $1 FOR NO KEY UPDATE", sale)
	require.NoError(t, err)
	var group []*batch.Submission
	for _, event := range events {
		group = append(group, &batch.Submission{Event: event, Done: make(chan error, 1)})
	}
	over := make(chan *batch.InFlightBatch, 1)
	go func() {
		f := &batch.InFlightBatch{Batch: group}
		b.Process(t.Context(), f)
		over <- f
	}()
	testkit.Eventually(t, 10*time.Second, "the orders wait to be counted", func() bool {
		return s.Count(t,
			"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") == 1
	})
	_, err = rebuilder.Exec(t.Context(), "UPDATE sales SET epoch = 2 WHERE id = $1", sale)
	require.NoError(t, err)
	require.NoError(t, rebuilder.Commit(t.Context()))

	require.Empty(t, (<-over).Deferred)
	for i, submitted := range group {
		require.NoError(t, testshop.Answer(t, submitted.Done), "it is to be acknowledged")
		want := "2 OrderVoided"
		if events[i].SaleID == other {
			want = "2 OrderConfirmed"
		}
		require.Equal(t, []string{"1 OrderReserved", want}, testshop.History(t, s.Pool, submitted.Event.OrderID))
	}
	require.Zero(t, testshop.SoldOf(t, s.Pool, sale))
	require.EqualValues(t, 2, testshop.SoldOf(t, s.Pool, other))
	require.EqualValues(t, 2,
		s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided' AND reason = 'sale-rebuilt'"))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("voided")))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("confirmed")))
	require.Zero(t, log.Times("cannot record orders in Postgres, trying again"), "that is no outage")

	// Delivered once more, they are as they were.
	redelivered := &batch.Submission{Event: events[0], Done: make(chan error, 1)}
	f := &batch.InFlightBatch{Batch: []*batch.Submission{redelivered}}
	b.Process(t.Context(), f)
	require.Empty(t, f.Deferred)
	require.NoError(t, testshop.Answer(t, redelivered.Done))
	require.Equal(t, 2.0, testutil.ToFloat64(b.Metrics.Orders.WithLabelValues("voided")))
	require.Zero(t, testshop.SoldOf(t, s.Pool, sale))
}

// The units of a voided order were not counted when the sale was rebuilt, so they do not come back.
func TestVoidedOrderReleasesNothing(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "alice")
	msgs := testwork.Messages(s, t)
	testshop.RaiseEpoch(t, s.Pool, sale)
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, sale), "epoch", 2).Err())
	b := testwork.Batch(s, t, nil)
	for _, a := range testwork.Handle(b, msgs...) {
		require.NoError(t, testshop.Answer(t, a))
	}
	require.EqualValues(t, 1, s.Count(t, "SELECT count(*) FROM orders WHERE status = 'voided'"))
	require.EqualValues(t, 9, s.Left(t, sale), "nobody has given the unit of this reservation back")
	require.True(t, s.Rdb.HExists(t.Context(), s.Keys.Buyers(0, sale), "alice").Val())
}
