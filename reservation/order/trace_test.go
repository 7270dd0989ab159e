package order_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation/order"
)

const traceParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// tracedMessage returns the message of these orders as a stock subscriber has it.
func tracedMessage(t *testing.T, events ...order.OrderReserved) *message.Message {
	t.Helper()
	first := events[0]
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(map[string]any{
		redisstream.UUIDHeaderKey: order.CompactID(first.OrderID),
		"metadata":                order.ReservedMetadata(first.SaleID, 1, len(events), order.TracesOf(events...)...),
		"payload":                 string(order.ReservedPayload(1, events...)),
	})
	require.NoError(t, err)
	return msg
}

func eventsOf(n int) (events []order.OrderReserved) {
	sale := uuid.Must(uuid.NewV7())
	for i := range n {
		events = append(events, order.OrderReserved{
			OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "user", Quantity: 1, Epoch: 1, Sequence: int64(i + 1),
			ReservedAt: time.UnixMilli(1_795_000_000_000).UTC(),
		})
	}
	return events
}

func TestEachOrderOfMessageHasItsTrace(t *testing.T) {
	t.Parallel()
	for _, traced := range []int{0, 1, 2, order.MaxTraces} {
		events := eventsOf(20)
		for i := range traced {
			events[i+3].TraceParent = traceParent[:50] + string("0123456789abcdef"[i]) + traceParent[51:]
		}
		msg := tracedMessage(t, events...)
		got, err := order.DecodeReserved(msg)
		require.NoError(t, err)
		require.Equal(t, events, got)
		require.Equal(t, events[3].TraceParent, msg.Metadata.Get("traceparent"), "for a stock subscriber")
	}
	// More than fit have none.
	events := eventsOf(30)
	for i := range events {
		events[i].TraceParent = traceParent
	}
	got, err := order.DecodeReserved(tracedMessage(t, events...))
	require.NoError(t, err)
	require.Empty(t, got[order.MaxTraces].TraceParent)
	require.Equal(t, traceParent, got[order.MaxTraces-1].TraceParent)
}

// Damaged traces are left out, and cost no order.
func TestDamagedTracesAreNone(t *testing.T) {
	t.Parallel()
	event := eventsOf(1)[0]
	id := order.CompactID(event.OrderID)
	for _, traces := range []string{
		" ", "\n\n", id, id + " ", id + " " + traceParent[:54], id + " " + traceParent + "0",
		id + " '; DROP TABLE orders; --",
		id + " " + strings.Replace(traceParent, "4", "é", 1), id + " " + strings.ToUpper(traceParent), "x " + traceParent,
		order.CompactID(uuid.New()) + " " + traceParent, strings.Repeat("x", 100_000),
		strings.Repeat(order.CompactID(uuid.New())+" "+traceParent+"\n", 1000), id + " 01" + traceParent[2:],
	} {
		msg := tracedMessage(t, event)
		msg.Metadata["traces"] = traces
		got, err := order.DecodeReserved(msg)
		require.NoError(t, err, traces)
		require.Equal(t, []order.OrderReserved{event}, got, traces)
	}
}
