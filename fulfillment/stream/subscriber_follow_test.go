package stream_test

import (
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/reservation/order"
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
