package lua_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

func TestClockIsThatOfServer(t *testing.T) {
	t.Parallel()
	rdb, key := testkit.Redis(t), testkit.Keys(t).Orders(0)
	ms, err := lua.Clock.Run(t.Context(), rdb, []string{key}).Int64()
	require.NoError(t, err)
	require.Zero(t, ms, "there is no stream")
	require.NoError(t, rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"a", "b"}}).Err())
	before := rdb.Time(t.Context()).Val()
	ms, err = lua.Clock.Run(t.Context(), rdb, []string{key}).Int64()
	require.NoError(t, err)
	require.WithinRange(t, time.UnixMilli(ms), before.Add(-time.Millisecond), rdb.Time(t.Context()).Val())
}
