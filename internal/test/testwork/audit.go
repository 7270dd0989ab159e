package testwork

import (
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/stream"
	"stampede/upkeep/audit"
)

// Fulfil records the unread events of the stream, without a worker.
func Fulfil(s *testshop.Shop, t testing.TB) []ledger.Outcome {
	t.Helper()
	return fulfilIn(s, t, 0)
}

// FulfilAll is Fulfil for the partitions that have unread events.
func FulfilAll(s *testshop.Shop, t testing.TB) {
	t.Helper()
	for p := range s.Keys.Partitions {
		if s.Rdb.Exists(t.Context(), s.Keys.Orders(p)).Val() == 0 {
			continue
		}
		waiting, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
		require.NoError(t, err)
		if n, known := waiting.Waiting(); !known || n > 0 {
			fulfilIn(s, t, p)
		}
	}
}

func fulfilIn(s *testshop.Shop, t testing.TB, partition int) []ledger.Outcome {
	t.Helper()
	ctx, key := t.Context(), s.Keys.Orders(partition)
	require.NoError(t, stream.CreateGroup(ctx, s.Rdb, key, reservation.Group))
	read, err := s.Rdb.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: reservation.Group, Consumer: "test",
		Streams: []string{key, ">"}, Count: 10_000, Block: -1,
	}).Result()
	require.NoError(t, err)
	var ids []string
	for _, entry := range read[0].Messages {
		ids = append(ids, entry.ID)
	}
	outcomes, err := ledger.New(s.Pool).Record(ctx, eventsIn(t, read[0].Messages))
	require.NoError(t, err)
	require.NoError(t, s.Rdb.XAck(ctx, key, reservation.Group, ids...).Err())
	return outcomes
}

func Audit(s *testshop.Shop, t testing.TB, sale uuid.UUID) audit.Report {
	t.Helper()
	report, err := audit.Run(t.Context(), audit.Config{Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Sale: sale})
	require.NoError(t, err)
	return report
}

// Broken returns the names of the broken promises.
func Broken(r audit.Report) (names string) {
	for _, p := range r.Promises {
		if !p.Kept() {
			names += p.Name + " "
		}
	}
	return strings.TrimSpace(names)
}

func TextOf(t testing.TB, r audit.Report) string {
	t.Helper()
	var text strings.Builder
	require.NoError(t, r.WriteText(&text))
	return text.String()
}
