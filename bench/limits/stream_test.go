package limits

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// readBatch is how many entries a worker asks for at most.
const readBatch = 500

// readStream reads and acknowledges a stream to its end, as one consumer that does nothing with the
// entries, and returns how many there were.
func readStream(b *testing.B, rdb *redis.Client, stream string) int {
	b.Helper()
	ctx := b.Context()
	read := 0
	for {
		page, err := rdb.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: reservation.Group, Consumer: "limits", Streams: []string{stream, ">"}, Count: readBatch,
			Block: -1, // return at once where there is nothing
		}).Result()
		if err == redis.Nil { //nolint:errorlint // go-redis returns it as it is
			return read
		}
		require.NoError(b, err)
		ids := make([]string, len(page[0].Messages))
		for i, message := range page[0].Messages {
			ids[i] = message.ID
		}
		acked, err := rdb.XAck(ctx, stream, reservation.Group, ids...).Result()
		require.NoError(b, err)
		require.EqualValues(b, len(ids), acked)
		read += len(ids)
	}
}
