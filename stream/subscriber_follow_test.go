package stream_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation/order"
	"stampede/stream"
)

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
		c.Client.AddHook(testkit.Hook(reads.process))
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
