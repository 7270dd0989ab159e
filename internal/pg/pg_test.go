package pg_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"stampede/internal/pg"
	"stampede/internal/testkit"
)

func TestBeginFailsOnHeldLock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	first, err := pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.NoError(t, err)
	_, err = pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.ErrorIs(t, err, pg.ErrLockHeld)
	other, err := pg.Begin(t.Context(), pool, pg.ReconcileLock, 0)
	require.NoError(t, err, "another lock is free")
	other.End()
	first.End()
	again, err := pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.NoError(t, err)
	again.End()
}

func TestBeginTakesSessionOutOfPool(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s, err := pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.NoError(t, err)
	require.Zero(t, pool.Stat().AcquiredConns())
	_, err = pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.ErrorIs(t, err, pg.ErrLockHeld)
	require.Zero(t, pool.Stat().AcquiredConns(), "a failed attempt must leave no connection")
	s.End()
	require.True(t, s.IsClosed())
}

func TestBeginLimitsSilenceIfGiven(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	setting := func(silence time.Duration) (value string) {
		s, err := pg.Begin(t.Context(), pool, pg.RebuildLock, silence)
		require.NoError(t, err)
		defer s.End()
		require.NoError(t, s.QueryRow(t.Context(), "SHOW idle_session_timeout").Scan(&value))
		return value
	}
	require.Equal(t, "0", setting(0))
	require.Equal(t, "7s", setting(7*time.Second))
}

func TestSessionLocksUntilItEnds(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	_, err = pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.ErrorIs(t, err, pg.ErrLockHeld)
	s.End()
	again, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	again.End()
}

func TestHolderReturnsSession(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	_, err := pg.Holder(t.Context(), pool, pg.RebuildLock)
	require.ErrorIs(t, err, pgx.ErrNoRows)
	s, err := pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.NoError(t, err)
	defer s.End()
	holder, err := pg.Holder(t.Context(), pool, pg.RebuildLock)
	require.NoError(t, err)
	require.Equal(t, s.PgConn().PID(), uint32(holder.PID))
	require.Contains(t, holder.String(), "idle")
}

func TestTerminateEndsSilentBlocker(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	silent, err := pg.Begin(t.Context(), pool, pg.RebuildLock, 0)
	require.NoError(t, err)
	defer silent.End()
	_, err = silent.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	got := make(chan error, 1)
	go func() {
		waiting, err := pg.Begin(t.Context(), pool, pg.ReconcileLock, 0)
		if err == nil {
			defer waiting.End()
			_, err = waiting.Exec(t.Context(), "SELECT pg_advisory_lock($1)", pg.RebuildLock)
		}
		got <- err
	}()
	// Postgres has answered a query before it waits for the next one.
	silentBlocker := func() pg.Activity {
		var found []pg.Activity
		testkit.Eventually(t, 30*time.Second, "a silent session blocks another", func() bool {
			found, err = pg.Blockers(t.Context(), pool)
			require.NoError(t, err)
			return len(found) > 0 && found[0].Silent
		})
		require.Len(t, found, 1)
		return found[0]
	}
	found := silentBlocker()

	_, err = silent.Exec(t.Context(), "SELECT 1")
	require.NoError(t, err)
	ended, err := found.Terminate(t.Context(), pool)
	require.NoError(t, err)
	require.False(t, ended, "its client has been active since")

	found = silentBlocker()
	ended, err = found.Terminate(t.Context(), pool)
	require.NoError(t, err)
	require.True(t, ended)
	require.NoError(t, <-got, "the lock is free")
}
