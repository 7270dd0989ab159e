package batch_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation/order"
	"stampede/stream"
)

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
	require.Equal(t, "4", made[0].Attributes["stampede.orders"])
	require.Len(t, made[0].Links, 2)
	for _, span := range orders {
		require.Equal(t, "00f067aa0ba902b7", span.Parent)
		require.Equal(t, "7-1", span.Attributes["stampede.entry_id"])
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
