package limits

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
)

// readBatch is the most entries that a worker asks for.
const readBatch = 64

// readStream reads and acknowledges a stream to its end, as one consumer that does nothing with the
// entries, and returns the number of their orders.
func readStream(b *testing.B, rdb redis.UniversalClient, key string) int {
	b.Helper()
	ctx := b.Context()
	count := 0
	for {
		streams, err := rdb.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: reservation.Group, Consumer: "limits", Streams: []string{key, ">"}, Count: readBatch,
			Block: -1, // no wait for new entries
		}).Result()
		if err == redis.Nil { //nolint:errorlint // go-redis returns it as it is
			return count
		}
		require.NoError(b, err)
		ids := make([]string, len(streams[0].Messages))
		for i, message := range streams[0].Messages {
			ids[i] = message.ID
			count += order.CountReserved(message.Values[stream.FieldPayload].(string))
		}
		acked, err := rdb.XAck(ctx, key, reservation.Group, ids...).Result()
		require.NoError(b, err)
		require.EqualValues(b, len(ids), acked)
	}
}
