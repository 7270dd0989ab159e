package testwork

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/ledger/deadletter"
	"stampede/reservation"
	"stampede/stream"
)

// AppendUnreadable appends an entry to the stream that is not an event, and returns it.
func AppendUnreadable(s *testshop.Shop, t testing.TB) stream.Entry {
	t.Helper()
	key := s.Keys.Orders(0)
	id, err := s.Rdb.XAdd(t.Context(), &redis.XAddArgs{
		Stream: key,
		Values: []any{"foo", "1", "foo", testshop.EveryByte, "bar", "é"},
	}).Result()
	require.NoError(t, err)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, id)
	require.NoError(t, err)
	entry.Deliveries = 3
	return entry
}

func OnlyLetter(s *testshop.Shop, t testing.TB, letters *deadletter.Store) deadletter.Letter {
	t.Helper()
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 1)
	return all[0]
}

// TakeOut removes the only entry from the stream and returns it.
func TakeOut(s *testshop.Shop, t testing.TB) stream.Entry {
	t.Helper()
	key := s.Keys.Orders(0)
	entries := s.Rdb.XRange(t.Context(), key, "-", "+").Val()
	require.Len(t, entries, 1)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, entries[0].ID)
	require.NoError(t, err)
	require.NoError(t, stream.CreateGroup(t.Context(), s.Rdb, key, reservation.Group))
	require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	return entry
}
