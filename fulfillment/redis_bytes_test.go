//go:build system

package fulfillment_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// redisBytes returns the memory of Redis without the buffers of its connections.
func redisBytes(t testing.TB, rdb redis.UniversalClient) int64 {
	t.Helper()
	info, err := rdb.Info(t.Context(), "memory").Result()
	require.NoError(t, err)
	_, rest, _ := strings.Cut(info, "\nused_memory:")
	text, _, _ := strings.Cut(rest, "\r")
	held, err := strconv.ParseInt(text, 10, 64)
	require.NoError(t, err)
	clients, err := rdb.ClientList(t.Context()).Result()
	require.NoError(t, err)
	for client := range strings.Lines(clients) {
		_, rest, _ := strings.Cut(client, " tot-mem=")
		text, _, _ := strings.Cut(rest, " ")
		lent, err := strconv.ParseInt(text, 10, 64)
		require.NoError(t, err)
		held -= lent
	}
	return held
}

// TestConfirmedOrderTakesAtMost150BytesOfRedis uses user ids of 36 characters, like UUIDs, and counts
// what is kept besides the order: the outcome messages in their largest form, and the rest of the stream.
func TestConfirmedOrderTakesAtMost150BytesOfRedis(t *testing.T) {
	t.Parallel()
	const orders, concurrent, bytesMax = 100_000, 512, 150
	s := testshop.NewShopOn(t, testshop.Options{
		RedisURL: testkit.OwnRedis(t).URL, Keys: reservation.Keys{Prefix: reservation.DefaultPrefix, Partitions: 1},
	})
	sale, key := s.Open(t, orders), s.Keys.Orders(0)
	s.Buy(t, sale, "first") // loads the scripts into Redis
	before := redisBytes(t, s.Rdb)

	var buyers errgroup.Group
	ids := make([]uuid.UUID, orders-1)
	for from := range concurrent {
		buyers.Go(func() error {
			for i := from; i < len(ids); i += concurrent {
				answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: uuid.NewString(), Quantity: 1})
				if err != nil {
					return err
				}
				ids[i] = answer.Reservation.OrderID
			}
			return nil
		})
	}
	require.NoError(t, buyers.Wait())
	require.EqualValues(t, orders, s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val())

	_, o, _ := testwork.PublishingLedger(t, s.Pool, s.Rdb, s.Keys)
	for rest := ids; len(rest) > 0; {
		outcomes := make([]order.OrderOutcome, min(ledger.OutcomesPerMessage, len(rest)))
		for i := range outcomes {
			outcomes[i] = order.OrderOutcome{OrderID: rest[i], Status: order.StatusConfirmed, Version: 2}
		}
		o.Publish(t.Context(), 0, outcomes)
		rest = rest[len(outcomes):]
	}
	require.NoError(t, s.Rdb.XGroupCreate(t.Context(), key, reservation.Group, "$").Err(), "all entries are processed")
	for {
		trimmed, err := stream.TrimOnce(t.Context(), s.Rdb, key)
		require.NoError(t, err)
		if trimmed == 0 {
			break
		}
	}
	// Redis grows the table of a hash, and frees the old one, in small steps.
	var each int64
	defer func() { t.Logf("%d bytes for each order", each) }()
	testkit.Eventually(t, 20*time.Second, "an order takes at most bytesMax", func() bool {
		each = (redisBytes(t, s.Rdb) - before) / int64(len(ids))
		return each <= bytesMax
	})
}
