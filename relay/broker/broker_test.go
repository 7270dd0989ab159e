package broker_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/relay/broker"
	"stampede/relay/feed"
)

// The metrics of Kafka's client have one goroutine, which never ends.
const kafkaMeter = "github.com/rcrowley/go-metrics.(*meterArbiter).tick"

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.IgnoreLeaks(goleak.IgnoreAnyFunction(kafkaMeter)))
}

func eventNumber(n int) *feed.Event {
	id := fmt.Sprintf("order-%d", n)
	e := &feed.Event{ID: id + ".2", Subject: id, Body: fmt.Appendf(nil, `{"id":"%s.2"}`, id)}
	if n%2 == 1 {
		e.TraceParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	}
	return e
}

func TestStockSubscriberReadsStream(t *testing.T) {
	t.Parallel()
	client, err := connect.Control(testkit.RedisURL(t))
	require.NoError(t, err)
	stream := testkit.Keys(t).Prefix + ":events"
	p, err := broker.NewStream(client, stream, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	const events = 10
	for n := range events {
		require.NoError(t, p.Send(t.Context(), eventNumber(n)))
	}
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client: testkit.Redis(t), ConsumerGroup: "shop",
	}, watermill.NopLogger{})
	require.NoError(t, err)
	messages, err := subscriber.Subscribe(t.Context(), stream)
	require.NoError(t, err)
	for n := range events {
		select {
		case m := <-messages:
			want := eventNumber(n)
			require.Equal(t, want.ID, m.UUID)
			require.Equal(t, string(want.Body), string(m.Payload))
			require.Equal(t, want.Subject, m.Metadata.Get("partitionkey"))
			require.Equal(t, "application/cloudevents+json", m.Metadata.Get("content-type"))
			parent, traced := m.Metadata["traceparent"]
			require.Equal(t, want.TraceParent, parent)
			require.Equal(t, n%2 == 1, traced)
			m.Ack()
		case <-time.After(time.Minute):
			t.Fatal("no message")
		}
	}
	require.NoError(t, subscriber.Close())
}

func TestStreamKeepsItsNewestEntries(t *testing.T) {
	t.Parallel()
	client, err := connect.Control(testkit.RedisURL(t))
	require.NoError(t, err)
	stream := testkit.Keys(t).Prefix + ":events"
	p, err := broker.NewStream(client, stream, 100)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	for n := range 1000 {
		require.NoError(t, p.Send(t.Context(), eventNumber(n)))
	}
	kept, err := testkit.Redis(t).XLen(t.Context(), stream).Result()
	require.NoError(t, err)
	require.Less(t, kept, int64(300), "Redis removes whole nodes of entries")
}

type tornWriter struct {
	bytes.Buffer
	fails int
}

func (w *tornWriter) Write(p []byte) (int, error) {
	if w.fails > 0 {
		w.fails--
		n, _ := w.Buffer.Write(p[:len(p)/2])
		return n, errors.New("disk full")
	}
	return w.Buffer.Write(p)
}

func TestLinesAfterTornLine(t *testing.T) {
	t.Parallel()
	w := &tornWriter{}
	l := broker.NewLines(w)
	require.NoError(t, l.Send(t.Context(), eventNumber(1)))
	w.fails = 1
	require.ErrorContains(t, l.Send(t.Context(), eventNumber(2)), "disk full")
	require.NoError(t, l.Send(t.Context(), eventNumber(2)))
	require.Equal(t, "{\"id\":\"order-1.2\"}\n{\"id\":\"or\n{\"id\":\"order-2.2\"}\n", w.String())
}

// Nobody reads the output: a delivery ends with its context, and what was written comes later.
func TestLinesThatNobodyReads(t *testing.T) {
	t.Parallel()
	reader, writer := io.Pipe()
	l := broker.NewLines(writer)
	for n := range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		require.ErrorIs(t, l.Send(ctx, eventNumber(n+1)), context.DeadlineExceeded)
		cancel()
	}
	sent := make(chan error, 1)
	go func() { sent <- l.Send(t.Context(), eventNumber(2)) }()
	lines := bufio.NewScanner(reader)
	for _, want := range []string{`{"id":"order-1.2"}`, `{"id":"order-2.2"}`} {
		require.True(t, lines.Scan())
		require.Equal(t, want, lines.Text())
	}
	require.NoError(t, lines.Err())
	require.NoError(t, <-sent)
}
