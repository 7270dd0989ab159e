package rebuild_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
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

// logText is a log that can be read while it is written.
type logText struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// lines returns the lines that contain all words.
func (l *logText) lines(words ...string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		has := true
		for _, word := range words {
			has = has && strings.Contains(line, word)
		}
		if has {
			found = append(found, line)
		}
	}
	return found
}

func (l *logText) await(t *testing.T, words ...string) string {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the log says "+strings.Join(words, " … "),
		func() bool { return len(l.lines(words...)) > 0 })
	return l.lines(words...)[0]
}

// guardedLogging runs a worker and returns what it writes to its log.
func guardedLogging(t *testing.T, s *testshop.Shop) *logText {
	t.Helper()
	log := &logText{}
	config := testwork.Config(t, s)
	config.GuardInterval, config.Logger = 20*time.Millisecond, slog.New(slog.NewTextHandler(log, nil))
	testwork.Work(t, config)
	return log
}

// Another session locks the row of the sale: the log names the step and that session while the rebuild waits.
func TestWaitingRebuildLogsBlocker(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	hold, err := s.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = hold.Rollback(context.Background()) }()
	var holder string
	require.NoError(t, hold.QueryRow(t.Context(),
		"SELECT 'session ' || pg_backend_pid() FROM sales WHERE id = $1 FOR UPDATE", sale).Scan(&holder))
	done := make(chan error, 1)
	log := &logText{}
	r, err := rebuild.New(rebuild.Config{
		Pool: s.Pool, Redis: s.Rdb, Keys: s.Keys, Store: s.Store, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	require.NoError(t, err)
	go func() {
		_, err := r.Sale(context.Background(), sale, rebuild.ReasonByHand)
		done <- err
	}()
	line := log.await(t, rebuild.LogWaiting, "raise the epoch of the sale", holder)
	require.Contains(t, line, "level=WARN")
	require.Contains(t, line, sale.String())
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, <-done)
	s.RequireSound(t)
}

// A repeated error is logged once, and then with each new attempt.
func TestFailingRebuildLogsReason(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(t, s)
	// The entry is unread again, so the rebuild records it.
	require.NoError(t, s.Rdb.XGroupSetID(t.Context(), s.Keys.Orders(0), reservation.Group, "0").Err())
	require.NoError(t, s.Exec(t, "DROP INDEX orders_one_live_per_user"))
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	log := guardedLogging(t, s)
	const plain = "orders_one_live_per_user"
	require.Contains(t, log.await(t, rebuild.LogFailed, plain, "is missing"), "level=ERROR")
	log.await(t, rebuild.LogBegunPartition, "last_error=", plain, "failed_tries=2")
	require.Len(t, log.lines(rebuild.LogFailed), 1, "the next attempt logs the same error")

	require.NoError(t, s.Exec(t,
		"CREATE UNIQUE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid')"))
	log.await(t, "rebuilt the stock from Postgres")
	testwork.RequireNoNeeds(t, s, 1)
	s.RequireSound(t)
}

func TestWorkerLogsRebuildItWaitsFor(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	s.Open(t, 10)
	session, err := testwork.Rebuilder(t, s).Begin(t.Context(), 0)
	require.NoError(t, err)
	var holder string
	require.NoError(t, session.Conn().QueryRow(t.Context(), "SELECT 'session ' || pg_backend_pid()").Scan(&holder))
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	log := guardedLogging(t, s)
	log.await(t, rebuild.LogOtherRebuild, holder, "reason=server")
	session.End()
	log.await(t, "rebuilt the stock from Postgres")
	require.Len(t, log.lines(rebuild.LogOtherRebuild), 1, "not at each check")
	testwork.RequireNoNeeds(t, s, 1)
}

// Ended sales are checked less often than others, and count in between as they were.
func TestBehindCountsOrdersOfAllSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	open, ended := s.Open(t, 100), s.Open(t, 100)
	r := testwork.Rebuilder(t, s)
	behind := func(withEnded bool) int64 {
		required, err := r.Required(t.Context(), withEnded)
		require.NoError(t, err)
		_, err = r.HealPartition(t.Context(), 0, required)
		require.NoError(t, err)
		return r.Behind(0)
	}
	require.Zero(t, behind(true))
	for _, user := range []string{"ann", "bob", "cid"} {
		s.Buy(t, open, user)
		s.Buy(t, ended, user)
	}
	_, err := s.Catalog.End(t.Context(), ended)
	require.NoError(t, err)
	require.EqualValues(t, 3, behind(false))
	require.EqualValues(t, 6, behind(true))
	testwork.Fulfil(t, s)
	require.EqualValues(t, 3, behind(false))
	require.Zero(t, behind(true))
	require.Zero(t, r.Behind(1))
}

// Only buyers of an open sale notice that Redis lacks it.
func TestShutCountsOpenSales(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	r := testwork.Rebuilder(t, s)
	requireShut := func(want int) {
		t.Helper()
		shut, err := r.Shut(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, want, shut)
	}
	requireShut(0)
	s.Lose(t, sale)
	for _, closed := range []string{"state = 'paused'", "opens_at = now() + interval '1 hour'", "closes_at = now()"} {
		requireShut(1)
		require.NoError(t, s.Exec(t, "UPDATE sales SET "+closed))
		requireShut(0)
		require.NoError(t, s.Exec(t, "UPDATE sales SET state = 'open', opens_at = NULL, closes_at = NULL"))
	}
}
