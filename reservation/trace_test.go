package reservation_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/tracing"
	"stampede/reservation"
	"stampede/reservation/order"
)

// One call decides several purchases, of which some are traced: each of these has its own span of the call, and its own
// traceparent in the entry, which a stock subscriber reads as it reads any other.
func TestCallOfSeveralTracedPurchases(t *testing.T) {
	tracer, collector := testkit.Tracer(t)
	rdb := testkit.Redis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "warm-up")
	held := heldCalls{requests: make(chan int, 100), released: make(chan struct{})}
	rdb.AddHook(testkit.Hook(held.process))

	type bought struct {
		user   string
		answer reservation.Answer
		err    error
	}
	answers := make(chan bought, 100)
	traceOf := map[string]string{}
	buy := func(user string, traced bool) {
		span := tracing.Span{}
		if traced {
			traceOf[user] = fmt.Sprintf("%032x", len(traceOf)+1)
			span = tracer.Request(http.Header{"Traceparent": {"00-" + traceOf[user] + "-00f067aa0ba902b7-01"}}, user)
			require.True(t, span.On())
		}
		go func() {
			defer span.End()
			answer, err := s.Reserve(span.In(t.Context()), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			answers <- bought{user, answer, err}
		}()
	}
	buy("first", false)
	require.Equal(t, 1, testshop.Answer(t, held.requests))
	const traced = 20
	for i := range traced {
		buy(fmt.Sprint("traced-", i), true)
	}
	buy("plain", false)
	testkit.Eventually(t, 30*time.Second, "all of them wait", func() bool { return s.Waiting(sale.ID) == traced+1 })
	held.released <- struct{}{}
	require.Equal(t, traced+1, testshop.Answer(t, held.requests))
	close(held.released)
	orders := map[string]order.Reservation{}
	for range traced + 2 {
		b := testshop.Answer(t, answers)
		require.NoError(t, b.err)
		orders[b.user] = b.answer.Reservation
	}

	testkit.Eventually(t, 30*time.Second, "the spans", func() bool {
		return len(collector.Named("", "reserve.lua")) == order.MaxTraces &&
			len(collector.Named("", "wait in line")) == traced
	})
	calls := map[string]testkit.Span{} // by trace
	links := map[string]int{}
	for _, call := range collector.Named("", "reserve.lua") {
		require.Equal(t, fmt.Sprint(traced+1), call.Attributes["stampede.purchases"])
		calls[call.Trace] = call
		for _, link := range call.Links {
			links[link]++
		}
	}
	require.Len(t, calls, order.MaxTraces, "one in each trace")
	ofFirst := 0
	for _, call := range calls {
		if len(call.Links) == order.MaxTraces-1 {
			ofFirst++
			require.Equal(t, order.MaxTraces-1, links[call.TraceParent()], "the others have links to it")
		}
	}
	require.Equal(t, 1, ofFirst)

	entries := s.Entries(t, 0)
	require.Len(t, entries, 3)
	require.Less(t, len(entries[1].Values["metadata"].(string)), 150, "an entry without traces")
	require.Less(t, len(entries[2].Values["metadata"].(string)), 1500)
	stock, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entries[2].Values)
	require.NoError(t, err)
	require.Contains(t, calls, strings.Split(stock.Metadata.Get("traceparent"), "-")[1])
	events, err := order.DecodeReserved(stock)
	require.NoError(t, err)
	require.Len(t, events, traced+1)
	parents := 0
	for _, e := range events {
		require.Equal(t, orders[e.UserID].OrderID, e.OrderID)
		call, carried := calls[traceOf[e.UserID]]
		if !carried {
			require.Empty(t, e.TraceParent, e.UserID)
			continue
		}
		parents++
		require.Equal(t, call.TraceParent(), e.TraceParent)
	}
	require.Equal(t, order.MaxTraces, parents)
}
