package pg_test

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/pg"
	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestBeginFailsOnHeldLock(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	first, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	_, err = pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.ErrorIs(t, err, pg.ErrLockHeld)
	other, err := pg.Begin(t.Context(), pool, pg.ReconcileLock, 0)
	require.NoError(t, err, "another lock is free")
	other.End()
	first.End()
	again, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	again.End()
}

func TestBeginTakesSessionOutOfPool(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	s, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	require.Zero(t, pool.Stat().AcquiredConns())
	_, err = pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.ErrorIs(t, err, pg.ErrLockHeld)
	require.Zero(t, pool.Stat().AcquiredConns(), "a failed attempt must leave no connection")
	s.End()
	require.True(t, s.IsClosed())
}

func TestBeginLimitsSilenceIfGiven(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	setting := func(silence time.Duration) (value string) {
		s, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, silence)
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
	_, err := pg.Holder(t.Context(), pool, pg.ProjectionLock)
	require.ErrorIs(t, err, pgx.ErrNoRows)
	s, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	defer s.End()
	holder, err := pg.Holder(t.Context(), pool, pg.ProjectionLock)
	require.NoError(t, err)
	require.Equal(t, s.PgConn().PID(), uint32(holder.PID))
	require.Contains(t, holder.String(), "idle")
}

func TestTerminateEndsSilentBlocker(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	silent, err := pg.Begin(t.Context(), pool, pg.ProjectionLock, 0)
	require.NoError(t, err)
	defer silent.End()
	_, err = silent.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	got := make(chan error, 1)
	go func() {
		waiting, err := pg.Begin(t.Context(), pool, pg.ReconcileLock, 0)
		if err == nil {
			defer waiting.End()
			_, err = waiting.Exec(t.Context(), "SELECT pg_advisory_lock($1)", pg.ProjectionLock)
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

// Both change two rows, in opposite orders, and meet after the first one.
func TestTransactionsInConflictAreRepeated(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
		pool := testkit.Pool(t)
		_, err := pool.Exec(t.Context(), "CREATE TABLE counters AS SELECT n, 0 AS count FROM generate_series(1, 2) AS n")
		require.NoError(t, err)
		var both, met sync.WaitGroup
		met.Add(2)
		for _, order := range [][]int{{1, 2}, {2, 1}} {
			meet := sync.OnceFunc(func() {
				met.Done()
				met.Wait()
			})
			both.Go(func() {
				assert.NoError(t, pg.InTransaction(t.Context(), pool, pgx.TxOptions{IsoLevel: isolation}, func(tx pgx.Tx) error {
					for _, n := range order {
						if _, err := tx.Exec(t.Context(), "UPDATE counters SET count = count + 1 WHERE n = $1", n); err != nil {
							return err
						}
						meet()
					}
					return nil
				}))
			})
		}
		both.Wait()
		var sum int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT sum(count) FROM counters").Scan(&sum))
		require.Equal(t, 4, sum, isolation)
		_, err = pool.Exec(t.Context(), "DROP TABLE counters")
		require.NoError(t, err)
	}
}
