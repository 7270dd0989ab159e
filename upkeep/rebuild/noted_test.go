package rebuild_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/rebuild"
)

const countNotes = "SELECT count(*) FROM rebuilds"

// held begins a rebuild that waits for the lock of a sale's row until release is called, which returns its result.
func held(t *testing.T, s *testshop.Shop) (release func() error) {
	t.Helper()
	sale := s.Open(t, 10)
	hold := s.HoldSale(t, sale)
	r := testwork.Rebuilder(t, s)
	done := make(chan error, 1)
	go func() {
		_, err := r.Partition(context.Background(), 0, rebuild.ReasonByHand)
		done <- err
	}()
	return func() error {
		require.NoError(t, hold.Rollback(context.Background()))
		return <-done
	}
}

func TestProgressIsNotedUntilRebuildEnds(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	require.NoError(t, s.Exec(t, `INSERT INTO rebuilds
		(id, partition, reason, process, began_at, beat_at, step, sales_done, sales_total)
		VALUES (gen_random_uuid(), 7, 'server', 'a process that died', now(), now() - interval '61 s', 'close', 0, 0)`))
	release := held(t, s)
	testkit.Eventually(t, 30*time.Second, "the rebuild is noted", func() bool {
		return s.Count(t, countNotes+" WHERE step LIKE 'raise the epoch of the sale%' AND partition = 0 AND sale_id IS NULL "+
			"AND reason = 'by-hand' AND process LIKE '%process %' AND sales_done = 0 AND sales_total = 1") == 1
	})
	require.EqualValues(t, 1, s.Count(t, countNotes), "that of the dead process is removed")
	before := s.Count(t, "SELECT (extract(epoch FROM beat_at) * 1000)::bigint FROM rebuilds")
	testkit.Eventually(t, 30*time.Second, "its heart beats", func() bool {
		return s.Count(t, "SELECT (extract(epoch FROM beat_at) * 1000)::bigint FROM rebuilds") > before
	})
	require.NoError(t, release())
	require.Zero(t, s.Count(t, countNotes))
	s.RequireSound(t)
}

// Nothing of a rebuild depends on its notes: not while they wait for a lock, and not while their table is missing.
func TestRebuildWorksWithoutItsNotes(t *testing.T) {
	t.Parallel()
	t.Run("the table is locked", func(t *testing.T) {
		t.Parallel()
		s := testshop.NewShop(t)
		release := held(t, s)
		testkit.Eventually(t, 30*time.Second, "the rebuild is noted", func() bool { return s.Count(t, countNotes) == 1 })
		lock, err := s.Pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = lock.Exec(t.Context(), "LOCK TABLE rebuilds")
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, release())
		require.Less(t, time.Since(began), 20*time.Second)
		require.NoError(t, lock.Rollback(t.Context()))
		s.RequireSound(t)
	})
	t.Run("the table is missing", func(t *testing.T) {
		t.Parallel()
		s := testshop.NewShop(t)
		require.NoError(t, s.Exec(t, "ALTER TABLE rebuilds RENAME TO hidden"))
		release := held(t, s)
		testkit.Eventually(t, 30*time.Second, "the rebuild waits for the row", func() bool {
			return testshop.TransactionsWaiting(t, s.Pool) == 1
		})
		require.NoError(t, release())
		require.NoError(t, s.Exec(t, "ALTER TABLE hidden RENAME TO rebuilds"))
		s.RequireSound(t)
	})
}
