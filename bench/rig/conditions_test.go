package rig

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
)

// The conditions are Conditions of the candidates, and not of the rig's own connections.
func TestShopHasItsConditions(t *testing.T) {
	const extra = 5 * time.Millisecond
	took := func(do func() error) time.Duration {
		began := time.Now()
		require.NoError(t, do())
		return time.Since(began)
	}
	least := func(do func() error) time.Duration {
		best := time.Hour
		for range 5 {
			best = min(best, took(do))
		}
		return best
	}
	ctx := t.Context()
	measure := func(s *Shop) (ping, set, query, commit time.Duration) {
		rdb, err := connect.Control(s.RedisURL)
		require.NoError(t, err)
		defer rdb.Close()
		pool, err := connect.Postgres(ctx, s.DatabaseURL, 1)
		require.NoError(t, err)
		defer pool.Close()
		ping = least(func() error { return rdb.Ping(ctx).Err() })
		set = least(func() error { return rdb.Set(ctx, s.prefix+":x", 1, 0).Err() })
		query = least(func() error { _, err := pool.Exec(ctx, "SELECT 1"); return err })
		_, err = pool.Exec(ctx, "CREATE TABLE marks ()")
		require.NoError(t, err)
		commit = least(func() error { _, err := pool.Exec(ctx, "INSERT INTO marks DEFAULT VALUES"); return err })
		return ping, set, query, commit
	}

	restore := Under(Conditions{RoundTrip: extra})
	far := Open(t)
	restore()
	ping, _, query, _ := measure(far)
	require.GreaterOrEqual(t, ping, extra)
	require.GreaterOrEqual(t, query, extra)
	require.Less(t, least(func() error { return far.Redis.Ping(ctx).Err() }), extra, "the rig's own connection is direct")
	require.Empty(t, far.Syncs())
	far.Close()

	if err := CanSlowSyncs(); err != nil {
		t.Logf("fsync is not slowed down: %v", err)
		return
	}
	restore = Under(Conditions{Sync: extra, CountSyncs: true})
	slow := Open(t)
	restore()
	before := slow.Syncs()
	ping, set, query, commit := measure(slow)
	calls := slow.Syncs().Since(before)
	require.Less(t, ping, extra)
	require.Less(t, query, extra)
	require.GreaterOrEqual(t, set, extra)
	require.GreaterOrEqual(t, commit, extra)
	require.GreaterOrEqual(t, calls[Redis], int64(5))
	require.GreaterOrEqual(t, calls[Postgres], int64(6))
}
