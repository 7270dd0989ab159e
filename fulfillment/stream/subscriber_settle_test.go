package stream_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
)

// commandCounter is a redis hook that counts the calls of one command, and the ids that they carried.
type commandCounter struct {
	name  string
	calls chan int // one value per call: how many arguments
}

func (c *commandCounter) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *commandCounter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (c *commandCounter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == c.name {
			c.calls <- len(cmd.Args())
		}
		return next(ctx, cmd)
	}
}

func TestAcksOfBatchAreSentTogether(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	counter := &commandCounter{name: "xack", calls: make(chan int, 1000)}
	b.rdb.AddHook(counter)
	const batch = 500
	b.publish(batch)
	messages := b.subscribe(b.subscriber("worker-1"))
	held := make([]*message.Message, batch)
	for i := range held {
		held[i] = receive(t, messages)
	}
	for _, msg := range held {
		msg.Ack()
	}
	b.awaitNonePending()
	close(counter.calls)
	calls, ids := 0, 0
	for args := range counter.calls {
		calls++
		ids += args - len([]string{"xack", "stream", "group"})
	}
	require.Equal(t, batch, ids, "each entry is acknowledged once")
	require.LessOrEqual(t, calls, 10, "%d acks went out in %d calls", ids, calls)
}

func TestEntryIsAcknowledgedAfterHandler(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(2)
	messages := b.subscribe(b.subscriber("worker-1"))
	first, second := receive(t, messages), receive(t, messages)
	second.Ack()
	testkit.Eventually(t, testshop.Soon, "the second is acknowledged", func() bool { return len(b.pending()) == 1 })
	require.Equal(t, first.Metadata.Get(order.MetaEntryID), b.pending()[0].ID)
	require.NoError(t, first.Context().Err())
	require.Error(t, second.Context().Err(), "a settled message's context is over")
	first.Ack()
	b.awaitNonePending()
}

func TestNackedMessageIsRetriedThenDeadLettered(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	registry := prometheus.NewRegistry()
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.MaxDeliveries, c.Registerer = 3, registry })
	id := b.add(stream.FieldUUID, "poison", "zebra", "1", "ant", "2", "zebra", "3", "bytes", "\xff")
	messages := b.subscribe(sub)
	for want := 1; want <= 3; want++ {
		msg := receive(t, messages)
		require.Equal(t, want, deliveriesOf(t, msg))
		require.EqualValues(t, want, b.pending()[0].RetryCount, "Redis counts every delivery")
		require.Equal(t, "\xff", msg.Metadata.Get("bytes"), "a redelivery does not see what a handler did to the message")
		msg.Metadata.Set("bytes", "changed")
		msg.Nack()
	}
	entries, reasons := b.grave.await(t, 1)
	require.Equal(t, stream.Entry{Stream: b.stream, ID: id, Deliveries: 3, Fields: []stream.Field{
		{stream.FieldUUID, "poison"}, {"zebra", "1"}, {"ant", "2"}, {"zebra", "3"}, {"bytes", "\xff"},
	}}, entries[0], "as it stands in the stream")
	require.ErrorContains(t, reasons[0], "3 deliveries")
	b.awaitNonePending()
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP stampede_entries_dead_lettered_total Stream entries stored as dead letters.
# TYPE stampede_entries_dead_lettered_total counter
stampede_entries_dead_lettered_total{stream="`+b.stream+`"} 1
# HELP stampede_entries_redelivered_total Messages delivered again after their handler had refused them.
# TYPE stampede_entries_redelivered_total counter
stampede_entries_redelivered_total{stream="`+b.stream+`"} 2
`), "stampede_entries_dead_lettered_total", "stampede_entries_redelivered_total"))
}

// Restarts of workers raise Redis's count of deliveries. That alone must not kill a healthy entry.
func TestDeliveryCountAloneMakesNoDeadLetter(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(1)
	id := b.takeAway("worker-0", 1)[0]
	require.NoError(t, b.rdb.Do(t.Context(), "XCLAIM", b.stream, reservation.Group, "worker-1", 0, id, "RETRYCOUNT", 70,
		"JUSTID").Err())

	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.MaxDeliveries = 3 }))
	msg := receive(t, messages)
	require.Equal(t, uuids[0], msg.UUID)
	require.Equal(t, 71, deliveriesOf(t, msg))
	msg.Ack()
	b.awaitNonePending()
	_, entries, _ := b.grave.look()
	require.Empty(t, entries)
}

func TestNacksAreRetriedWithDelay(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	const delay = 50 * time.Millisecond
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) {
		c.RedeliveryDelay, c.RedeliveryDelayMax, c.MaxDeliveries = delay, 2*delay, 100
	}))
	began := time.Now()
	const refusals = 5
	for range refusals {
		receive(t, messages).Nack()
	}
	receive(t, messages).Ack()
	// Waits of 50, 100, 100, 100, 100 ms, each of which may be cut to its half.
	require.GreaterOrEqual(t, time.Since(began), 9*delay/2)
	b.awaitNonePending()
}

func TestRetryDelayDoublesWithinBounds(t *testing.T) {
	t.Parallel()
	const first, longest = 100 * time.Millisecond, 5 * time.Second
	for try, full := range map[int]time.Duration{
		1: first, 2: 2 * first, 3: 4 * first, 6: 32 * first, 7: longest,
		40: longest, 1 << 40: longest,
	} {
		for range 100 {
			delay := retry.RetryDelay(try, first, longest)
			require.LessOrEqual(t, delay, full, "try %d", try)
			require.GreaterOrEqual(t, delay, full/2-1, "try %d", try)
		}
	}
	require.Equal(t, time.Duration(1), retry.RetryDelay(1, 1, 1))
}

func TestUnreadableEntryIsDeadLettered(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	first := b.publish(1)
	stray := b.add("foo", "bar")
	broken := b.add(stream.FieldUUID, "u", stream.FieldMetadata, "not msgpack")
	second := b.publish(1)
	messages := b.subscribe(b.subscriber("worker-1"))
	require.Equal(t, append(first, second...), receiveUUIDs(t, messages, 2))

	entries, reasons := b.grave.await(t, 2)
	for i := range entries {
		require.ErrorIs(t, reasons[i], order.ErrUndecodable)
		require.EqualValues(t, 1, entries[i].Deliveries)
	}
	require.ElementsMatch(t, []string{stray, broken}, []string{entries[0].ID, entries[1].ID})
	b.awaitNonePending()
}

func TestDeadLetterRetriesUntilStored(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.grave.setAway(true)
	stray := b.add("foo", "bar")
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.InFlightMax = 1 }))
	testkit.Eventually(t, testshop.Soon, "storing has failed twice",
		func() bool { tries, _, _ := b.grave.look(); return tries >= 2 })

	uuids := b.publish(3)
	require.Equal(t, uuids, receiveUUIDs(t, messages, 3), "with room for one in flight, and a dead letter waiting")
	testkit.Eventually(t, testshop.Soon, "only the stray entry is pending", func() bool {
		pending := b.pending()
		return len(pending) == 1 && pending[0].ID == stray
	})
	b.grave.setAway(false)
	b.grave.await(t, 1)
	b.awaitNonePending()
}

// A dead letter whose store stays away is still there after a restart.
func TestUnstoredDeadLetterSurvivesRestart(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.grave.setAway(true)
	b.add("foo", "bar")
	sub := b.subscriber("worker-1")
	b.subscribe(sub)
	testkit.Eventually(t, testshop.Soon, "storing has failed",
		func() bool { tries, _, _ := b.grave.look(); return tries >= 1 })
	require.NoError(t, sub.Close())
	require.Len(t, b.pending(), 1)

	b.grave.setAway(false)
	b.subscribe(b.subscriber("worker-1"))
	entries, _ := b.grave.await(t, 1)
	require.EqualValues(t, 2, entries[0].Deliveries)
	b.awaitNonePending()
}

func TestCloseWaitsForHandlersAndSendsAcks(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(3)
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.MaxDeliveries = 1 })
	messages := b.subscribe(sub)
	acked, refused, third := receive(t, messages), receive(t, messages), receive(t, messages)

	closed := make(chan struct{})
	for range 2 { // at the same time
		go func() {
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
			closed <- struct{}{}
		}()
	}
	testkit.Eventually(t, testshop.Soon, "subscribing is refused", func() bool {
		_, err := sub.Subscribe(t.Context(), "other")
		return err != nil
	})
	require.NoError(t, acked.Context().Err(), "handlers may finish their work")
	acked.Ack()
	refused.Nack() // says nothing about the entry now
	select {
	case <-closed:
		require.Fail(t, "Close did not wait for the third message")
	case <-third.Context().Done():
		require.Fail(t, "the context was cancelled while draining")
	case <-time.After(20 * time.Millisecond): // nothing is to happen
	}
	third.Ack()
	<-closed
	<-closed
	_, open := <-messages
	require.False(t, open)

	pending := b.pending()
	require.Len(t, pending, 1, "acks are in Redis when Close returns")
	require.Equal(t, refused.Metadata.Get(order.MetaEntryID), pending[0].ID)
	require.EqualValues(t, 1, pending[0].RetryCount)
	tries, _, _ := b.grave.look()
	require.Zero(t, tries, "nor does it make a dead letter")
	require.NoError(t, sub.Close())
	require.NoError(t, b.rdb.Ping(t.Context()).Err(), "the client is left open")
	_, err := sub.Subscribe(t.Context(), b.stream)
	require.ErrorIs(t, err, stream.ErrSubscriberClosed)
}

// The last acks may come in while the ones before are under way.
func TestCloseSendsLastAcks(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	ids := b.takeAway("worker-1", 1)
	sub := b.subscriber("worker-1")
	config := sub.Config()
	s := stream.NewSubscription(t.Context(), &config, sub.Metrics, b.stream)
	defer s.Expire()
	s.Acks.Add(ids[0])
	<-s.Acks.Wake
	settled := make(chan struct{})
	close(settled)
	s.Acknowledge(settled)
	require.Empty(t, b.pending())
}

func TestCloseAbandonsHangingHandler(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(2)
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.DrainTimeout = 5 * time.Millisecond })
	messages := b.subscribe(sub)
	hanging, done := receive(t, messages), receive(t, messages)
	done.Ack()
	require.NoError(t, sub.Close())
	require.Error(t, hanging.Context().Err(), "the handler is told")
	require.True(t, hanging.Ack(), "too late")

	require.Len(t, b.pending(), 1, "what was not settled stays pending")
	msg := receive(t, b.subscribe(b.subscriber("worker-1")))
	require.Equal(t, uuids[0], msg.UUID)
	msg.Ack()
	b.awaitNonePending()
}

// Cancelling the context of Subscribe ends that subscription as Close would, and no other.
func TestCancelDrainsOneSubscription(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	other := newStreamBench(t)
	b.publish(2)
	type key struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	sub := b.subscriber("worker-1")
	messages, err := sub.Subscribe(ctx, b.stream)
	require.NoError(t, err)
	others, err := sub.Subscribe(t.Context(), other.stream)
	require.NoError(t, err)

	msg := receive(t, messages)
	require.Equal(t, "value", msg.Context().Value(key{}))
	cancel()
	require.NoError(t, msg.Context().Err())
	msg.Ack()
	for msg := range messages { // the second one may have been on its way
		msg.Ack()
	}
	require.LessOrEqual(t, len(b.pending()), 1, "the message in hand is acknowledged")

	other.publish(1)
	receive(t, others).Ack()
	other.awaitNonePending()
}
