package batch_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"stampede/fulfillment/batch"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/stream"
)

// openPage returns the messages of two orders that were read in one page.
func openPage(t *testing.T) (s *testshop.Shop, page []*message.Message) {
	t.Helper()
	s = testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	s.Buy(t, sale, "bob")
	subscriber, err := stream.NewSubscriber(stream.Config{
		Client: s.Blocking, Control: s.Rdb, Group: reservation.Group, Consumer: "worker",
		DeadLetter: func(context.Context, stream.Entry, error) error { return nil }, Logger: testkit.Logger(t),
		DrainTimeout: time.Millisecond, // the messages are not acked
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, subscriber.Close()) })
	messages, err := subscriber.Subscribe(t.Context(), s.Keys.Orders(0))
	require.NoError(t, err)
	for range 2 {
		page = append(page, testshop.Answer(t, messages))
	}
	return s, page
}

func TestBatchWaitsForTheRestOfItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batcher(t, s, nil)
	b.SetPageWait(testshop.Soon)
	testwork.RunBatcher(t, b)
	first := testwork.Handle(b, page[0])
	testkit.Eventually(t, testshop.Soon, "the batch waits for the second message", b.AwaitsPage)
	second := testwork.Handle(b, page[1])
	require.NoError(t, testshop.Answer(t, first[0]))
	require.NoError(t, testshop.Answer(t, second[0]))
	require.EqualValues(t, 2, s.Count(t, testshop.ConfirmedOrders))
	require.EqualValues(t, 1, s.Count(t, "SELECT count(DISTINCT updated_at) FROM orders"))
}

func TestBatchDoesNotWaitLongForItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batch(t, s, nil)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, page[0])[0]))
	require.EqualValues(t, 1, s.Count(t, testshop.ConfirmedOrders))
}

func TestFullBatchDoesNotWaitForItsPage(t *testing.T) {
	t.Parallel()
	s, page := openPage(t)
	b := testwork.Batcher(t, s, func(c *batch.Config) { c.BatchMax = 1 })
	b.SetPageWait(time.Hour)
	testwork.RunBatcher(t, b)
	require.NoError(t, testshop.Answer(t, testwork.Handle(b, page[0])[0]))
}
