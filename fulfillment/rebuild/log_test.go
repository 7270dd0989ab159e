package rebuild_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/fulfillment/rebuild"
	"stampede/internal/retry"
	"stampede/internal/testkit"
	"stampede/internal/testshop"
	"stampede/internal/testwork"
	"stampede/reservation"
)

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

// lines are those that have all of the words.
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
func guardedLogging(s *testshop.Shop, t *testing.T) *logText {
	t.Helper()
	log := &logText{}
	config := testwork.Config(s, t)
	config.GuardInterval, config.Logger = 20*time.Millisecond, slog.New(slog.NewTextHandler(log, nil))
	testwork.Work(t, config)
	return log
}

// Somebody holds the row of the sale: the log tells while the rebuild waits at which step, and for whom.
func TestWaitingRebuildLogsBlocker(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
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
		_, err := r.Sale(context.Background(), sale, rebuild.RebuildByHand)
		done <- err
	}()
	line := log.await(t, rebuild.RebuildWaits, "raise the epoch of the sale", holder)
	require.Contains(t, line, "level=WARN")
	require.Contains(t, line, sale.String())
	require.NoError(t, hold.Rollback(t.Context()))
	require.NoError(t, <-done)
	s.RequireSound(t)
}

// A rebuild that fails each time for the same reason: each try says why the last one failed.
func TestFailingRebuildLogsReason(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	sale := s.Open(t, 10)
	s.Buy(t, sale, "ann")
	testwork.Fulfil(s, t)
	// Its entry is still in the stream, as that of an order is that some worker has in hand.
	require.NoError(t, s.Rdb.XGroupSetID(t.Context(), s.Keys.Orders(0), reservation.Group, "0").Err())
	require.NoError(t, testshop.ExecSQL(t, s, "DROP INDEX orders_one_live_per_user"))
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	log := guardedLogging(s, t)
	const plain = "orders_one_live_per_user"
	require.Contains(t, log.await(t, rebuild.RebuildFailed, plain, "is missing"), "level=ERROR")
	log.await(t, rebuild.RebuildingPart, "last_error=", plain, "failed_tries=2")
	require.Len(t, log.lines(rebuild.RebuildFailed), 1, "the same error is told by the next try")

	require.NoError(t,
		testshop.ExecSQL(t, s,
			"CREATE UNIQUE INDEX orders_one_live_per_user ON orders (sale_id, user_id) WHERE status IN ('confirmed', 'paid')"))
	log.await(t, "rebuilt the stock from Postgres")
	testwork.NeedNothing(s, t, 1)
	s.RequireSound(t)
}

// Another process has the lock of rebuilds: a worker that has found something to rebuild says who keeps it from that.
func TestWorkerLogsRebuildItWaitsFor(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t, testkit.Pool(t))
	s.Open(t, 10)
	session, err := testwork.Rebuilder(s, t).Begin(t.Context())
	require.NoError(t, err)
	var holder string
	require.NoError(t, session.Conn.QueryRow(t.Context(), "SELECT 'session ' || pg_backend_pid()").Scan(&holder))
	require.NoError(t, s.Store.Distrust(t.Context(), 0))
	log := guardedLogging(s, t)
	log.await(t, rebuild.OtherRebuilds, holder, "reason=server")
	session.Close()
	log.await(t, "rebuilt the stock from Postgres")
	require.Len(t, log.lines(rebuild.OtherRebuilds), 1, "and does not say it at each look")
	testwork.NeedNothing(s, t, 1)
}

// What fails and recovers all the time does not fill the log.
func TestFlappingOutageIsLoggedAtBoundedRate(t *testing.T) {
	t.Parallel()
	log := &logText{}
	o := retry.Outage{Log: slog.New(slog.NewTextHandler(log, nil)), Doing: "tell ingresses what became of orders"}
	for range 135 {
		o.Failed(errors.New("i/o timeout"))
		o.Over()
	}
	require.LessOrEqual(t, len(log.lines("cannot tell ingresses")), retry.OutagesTold+1)
	require.Len(t, log.lines("can tell ingresses"), len(log.lines("cannot tell ingresses")))
}
