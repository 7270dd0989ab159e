package designs

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"stampede/bench/front"
	"stampede/internal/test/testkit"
)

func TestStreamKeepsAcceptedOrdersAfterKill(t *testing.T) {
	t.Parallel()
	const accepted = 2 * stockSubscribers // some are being written, and some are not read yet
	s := newSale(t, 100, All["stock-stream"].Guarded)
	s.backend.Options = map[string]string{"max-idle-ms": "500"}
	process := s.start(t, "stock-stream")
	unblock := s.blockWrites(t)
	process.buyTimes(t, accepted)
	process.Kill()
	unblock()
	process = s.start(t, "stock-stream")
	require.Equal(t, http.StatusConflict, process.buy(t, "user-0"))
	testkit.Eventually(t, stockClaimDelay+timeout, "all accepted orders",
		func() bool { return s.orders(t) == accepted })
	pending := func() bool {
		p, err := s.rdb.XPending(t.Context(), s.backend.Prefix+":orders", stockGroup).Result()
		require.NoError(t, err)
		return p.Count == 0
	}
	testkit.Eventually(t, timeout, "all acks", pending)
	require.Equal(t, accepted, s.orders(t), "orders after all deliveries")
}

func TestScriptAppendsSameEntryAsStockPublisher(t *testing.T) {
	t.Parallel()
	s := newSale(t, 1, All["stock-stream"].Guarded)
	d := openDesign[*stockStream](t, s, newStockStream)
	o := s.order("alice")
	verdict, err := d.Buy(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, front.Reserved, verdict)

	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: testkit.Redis(t)},
		watermill.NopLogger{})
	require.NoError(t, err)
	payload, err := json.Marshal(streamOrder{Sale: o.Sale, User: o.User, Quantity: o.Quantity})
	require.NoError(t, err)
	require.NoError(t, publisher.Publish(d.streamKey(), message.NewMessage(o.ID.String(), payload)))

	entries, err := s.rdb.XRange(t.Context(), d.streamKey(), "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, entries[1].Values, entries[0].Values)
}
