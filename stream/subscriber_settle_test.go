package stream_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// commandCounter is a redis hook that records the calls of one command.
type commandCounter struct {
	name  string
	calls chan int // one value per call: the number of its arguments
}

func (c *commandCounter) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	if cmd.Name() == c.name {
		c.calls <- len(cmd.Args())
	}
	return next(ctx, cmd)
}

func TestAcksOfBatchAreSentTogether(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	counter := &commandCounter{name: "xack", calls: make(chan int, 1000)}
	const batch = 500
	b.publish(batch)
	messages := b.subscribe(b.subscriber("worker-1", hooked(counter.process)))
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

// Redis writes an ack and the read that takes it along to its disk at once. Only where reads wait for long is an ack
// sent alone.
func TestAcksAreSentWithReads(t *testing.T) {
	t.Parallel()
	for name, block := range map[string]time.Duration{"reads come": 5 * time.Millisecond, "reads wait": time.Second} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStreamBench(t)
			counter := &commandCounter{name: "xack", calls: make(chan int, 1000)}
			messages := b.subscribe(b.subscriber("worker-1", func(config *stream.Config) {
				config.BlockTimeout = block
				config.Control.AddHook(testkit.Hook(counter.process))
			}))
			const entries = 50
			for range entries {
				b.publish(1)
				receive(t, messages).Ack()
				if block > stream.AckWait {
					b.awaitNonePending()
				}
			}
			b.awaitNonePending()
			close(counter.calls)
			alone := 0
			for args := range counter.calls {
				alone += args - len([]string{"xack", "stream", "group"})
			}
			if block > stream.AckWait {
				require.Positive(t, alone)
			} else {
				require.Less(t, alone, entries)
			}
		})
	}
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
	require.Error(t, second.Context().Err(), "the context of a settled message is cancelled")
	first.Ack()
	b.awaitNonePending()
}

func TestNackedMessageIsRetriedThenDeadLettered(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	registry := prometheus.NewRegistry()
	sub := b.subscriber("worker-1", func(c *stream.Config) { c.MaxDeliveries, c.Registerer = 3, registry })
	const metadata = "\x81\xa4name\xa5value" // msgpack
	id := b.add(stream.FieldUUID, "poison", stream.FieldMetadata, metadata,
		"zebra", "1", "ant", "2", "zebra", "3", "bytes", "\xff")
	messages := b.subscribe(sub)
	for want := 1; want <= 3; want++ {
		msg := receive(t, messages)
		require.Equal(t, want, deliveriesOf(t, msg))
		require.EqualValues(t, want, b.pending()[0].RetryCount, "Redis counts every delivery")
		require.Equal(t, "value", msg.Metadata.Get("name"), "changes of a handler are not redelivered")
		msg.Metadata.Set("name", "changed")
		msg.Nack()
	}
	entries, reasons := b.deadLetters.await(t, 1)
	require.Equal(t, stream.Entry{Stream: b.stream, ID: id, Deliveries: 3, Fields: []stream.Field{
		{stream.FieldUUID, "poison"},
		{stream.FieldMetadata, metadata},
		{"zebra", "1"},
		{"ant", "2"},
		{"zebra", "3"},
		{"bytes", "\xff"},
	}}, entries[0], "as the stream holds it")
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

// Worker restarts raise Redis's count of deliveries. That alone must not make a healthy entry a dead letter.
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
	_, entries, _ := b.deadLetters.snapshot()
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
	const nacks = 5
	for range nacks {
		receive(t, messages).Nack()
	}
	receive(t, messages).Ack()
	// Waits of 50, 100, 100, 100, 100 ms, each of which may be halved.
	require.GreaterOrEqual(t, time.Since(began), 9*delay/2)
	b.awaitNonePending()
}

func TestUnreadableEntryIsDeadLettered(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	first := b.publish(1)
	foreign := b.add("foo", "bar")
	undecodable := b.add(stream.FieldUUID, "u", stream.FieldMetadata, "not msgpack")
	second := b.publish(1)
	require.Equal(t, append(first, second...), receiveUUIDs(t, b.subscribe(b.subscriber("worker-1")), 2))

	entries, reasons := b.deadLetters.await(t, 2)
	for i := range entries {
		require.ErrorIs(t, reasons[i], order.ErrUndecodable)
		require.EqualValues(t, 1, entries[i].Deliveries)
	}
	require.ElementsMatch(t, []string{foreign, undecodable}, []string{entries[0].ID, entries[1].ID})
	b.awaitNonePending()
}

func TestDeadLetterRetriesUntilStored(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.deadLetters.setAway(true)
	foreign := b.add("foo", "bar")
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) { c.InFlightMax = 1 }))
	testkit.Eventually(t, testshop.Soon, "storing has failed twice",
		func() bool { tries, _, _ := b.deadLetters.snapshot(); return tries >= 2 })

	uuids := b.publish(3)
	require.Equal(t, uuids, receiveUUIDs(t, messages, 3), "with one in flight, while a dead letter waits to be stored")
	testkit.Eventually(t, testshop.Soon, "only the foreign entry is pending", func() bool {
		pending := b.pending()
		return len(pending) == 1 && pending[0].ID == foreign
	})
	b.deadLetters.setAway(false)
	b.deadLetters.await(t, 1)
	b.awaitNonePending()
}

// A dead letter that could not be stored is stored after a restart.
func TestUnstoredDeadLetterSurvivesRestart(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.deadLetters.setAway(true)
	b.add("foo", "bar")
	sub := b.subscriber("worker-1")
	b.subscribe(sub)
	testkit.Eventually(t, testshop.Soon, "storing has failed",
		func() bool { tries, _, _ := b.deadLetters.snapshot(); return tries >= 1 })
	require.NoError(t, sub.Close())
	require.Len(t, b.pending(), 1)

	b.deadLetters.setAway(false)
	b.subscribe(b.subscriber("worker-1"))
	entries, _ := b.deadLetters.await(t, 1)
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

	bothClosed := make(chan struct{})
	for range 2 { // at the same time
		go func() {
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
			bothClosed <- struct{}{}
		}()
	}
	testkit.Eventually(t, testshop.Soon, "subscribing is refused", func() bool {
		_, err := sub.Subscribe(t.Context(), "other")
		return err != nil
	})
	require.NoError(t, acked.Context().Err(), "handlers may finish their work")
	acked.Ack()
	refused.Nack() // not counted during Close
	select {
	case <-bothClosed:
		require.Fail(t, "Close did not wait for the third message")
	case <-third.Context().Done():
		require.Fail(t, "the context was cancelled while draining")
	case <-time.After(20 * time.Millisecond): // nothing happens
	}
	third.Ack()
	<-bothClosed
	<-bothClosed
	_, open := <-messages
	require.False(t, open)

	pending := b.pending()
	require.Len(t, pending, 1, "acks are in Redis when Close returns")
	require.Equal(t, refused.Metadata.Get(order.MetaEntryID), pending[0].ID)
	require.EqualValues(t, 1, pending[0].RetryCount)
	tries, _, _ := b.deadLetters.snapshot()
	require.Zero(t, tries, "the nack makes no dead letter")
	require.NoError(t, sub.Close())
	require.NoError(t, b.rdb.Ping(t.Context()).Err(), "the client is left open")
	_, err := sub.Subscribe(t.Context(), b.stream)
	require.ErrorIs(t, err, stream.ErrSubscriberClosed)
}

// The last acks may arrive while the previous call is running.
func TestCloseSendsLastAcks(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	b.publish(1)
	ids := b.takeAway("worker-1", 1)
	sub := b.subscriber("worker-1")
	sub.SendLastAck(t.Context(), b.stream, ids[0])
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
	require.Error(t, hanging.Context().Err(), "its context is cancelled")
	require.True(t, hanging.Ack(), "too late")

	require.Len(t, b.pending(), 1, "the unsettled message stays pending")
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
	for msg := range messages { // the second message may have been delivered already
		msg.Ack()
	}
	require.LessOrEqual(t, len(b.pending()), 1, "the received message is acknowledged")

	other.publish(1)
	receive(t, others).Ack()
	other.awaitNonePending()
}

// One goroutine follows a page. An entry that takes long or is refused does not delay the others.
func TestEntriesOfPageAreSettledIndependently(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(20)
	messages := b.subscribe(b.subscriber("worker-1"))
	var page []*message.Message
	for range uuids {
		page = append(page, receive(t, messages))
	}
	for i, msg := range slices.Backward(page) {
		switch i {
		case 0: // takes long
		case 7:
			msg.Nack()
		default:
			msg.Ack()
		}
	}
	again := receive(t, messages)
	require.Equal(t, uuids[7], again.UUID)
	require.Equal(t, 2, deliveriesOf(t, again))
	testkit.Eventually(t, testshop.Soon, "all others are acknowledged", func() bool { return len(b.pending()) == 2 })
	again.Ack()
	testkit.Eventually(t, testshop.Soon, "the second delivery is acknowledged",
		func() bool { return len(b.pending()) == 1 })
	require.Equal(t, page[0].Metadata.Get(order.MetaEntryID), b.pending()[0].ID)
	require.NoError(t, page[0].Context().Err())
	page[0].Nack()
	last := receive(t, messages)
	require.Equal(t, uuids[0], last.UUID)
	last.Ack()
	b.awaitNonePending()
}

// A batcher waits for the rest of a page, so each page must come to an end.
func TestMessagesTellWhetherMoreOfTheirPageFollow(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	uuids := b.publish(2)
	b.add("no", "message")
	uuids = append(uuids, b.publish(1)...)
	b.add("no", "message") // the last one of its page
	messages := b.subscribe(b.subscriber("worker-1"))
	page := make([]*message.Message, len(uuids))
	for i := range page {
		page[i] = receive(t, messages)
	}
	testkit.Eventually(t, testshop.Soon, "the others are dead letters", func() bool { return len(b.pending()) == 3 })
	require.True(t, stream.NoteArrival(page[2].Context()), "handlers run concurrently")
	require.True(t, stream.NoteArrival(page[0].Context()))
	page[0].Nack()
	require.False(t, stream.NoteArrival(page[1].Context()))
	again := receive(t, messages)
	require.Equal(t, uuids[0], again.UUID)
	require.False(t, stream.NoteArrival(again.Context()), "it comes alone")
	require.False(t, stream.NoteArrival(t.Context()), "of another subscriber")
	for _, msg := range []*message.Message{page[1], page[2], again} {
		msg.Ack()
	}
	b.awaitNonePending()
}

// noteReads notes when reads of new entries begin, and when one has ended with entries.
type noteReads struct {
	mu    sync.Mutex
	found time.Time
	gaps  []time.Duration // from a read with entries to the next one
}

func (n *noteReads) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	if cmd.Name() != "xreadgroup" {
		return next(ctx, cmd)
	}
	n.mu.Lock()
	if !n.found.IsZero() {
		n.gaps = append(n.gaps, time.Since(n.found))
		n.found = time.Time{}
	}
	n.mu.Unlock()
	err := next(ctx, cmd)
	if err == nil {
		n.mu.Lock()
		n.found = time.Now()
		n.mu.Unlock()
	}
	return err
}

func (n *noteReads) pauses() (paused int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, gap := range n.gaps {
		if gap >= stream.ReadInterval {
			paused++
		}
	}
	return paused
}

func TestBusyStreamIsReadInIntervals(t *testing.T) {
	t.Parallel()
	b := newStreamBench(t)
	reads := &noteReads{}
	messages := b.subscribe(b.subscriber("worker-1", func(c *stream.Config) {
		c.Client.AddHook(testkit.HookAll{Hook: reads.process})
		c.InFlightMax = 100_000
	}))
	const pages = 20
	payload := strings.Repeat("\n\n", 2500) // of so many orders that a slow machine also reaches 500 a second
	for range pages {
		b.add(stream.FieldUUID, "a", stream.FieldPayload, payload)
		receive(t, messages).Ack()
	}
	require.GreaterOrEqual(t, reads.pauses(), pages-2, "all but the first, and the last, which may not be over")
}
