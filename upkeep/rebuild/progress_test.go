package rebuild_test

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/reservation"
	"stampede/sql"
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
	r, err := rebuild.New(rebuild.Config{Catalog: s.Catalog, Logger: slog.New(slog.NewTextHandler(log, nil))})
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

// gate stops a rebuilder before each call to Redis or to its session of Postgres until the test lets it pass.
type gate struct {
	arrived, pass chan struct{}
}

func newGate() gate { return gate{make(chan struct{}), make(chan struct{})} }

func (g gate) wait() {
	g.arrived <- struct{}{}
	<-g.pass
}

// DialHook implements redis.Hook.
func (g gate) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

// ProcessHook implements redis.Hook.
func (g gate) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		g.wait()
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements redis.Hook.
func (g gate) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		g.wait()
		return next(ctx, cmds)
	}
}

// TraceQueryStart implements pgx.QueryTracer. It never stops inside a transaction, for whose locks others would wait.
func (g gate) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	if conn.PgConn().TxStatus() == 'I' {
		g.wait()
	}
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (g gate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// rival is a rebuilder without the lock that runs one call at a time.
type rival struct {
	gate
	*rebuild.Rebuilder
	shop *testshop.Shop
	done chan error // the result of the current rebuild
	busy bool
}

func newRival(t *testing.T, s *testshop.Shop) *rival {
	t.Helper()
	r := &rival{gate: newGate(), done: make(chan error, 1)}
	options := *s.Rdb.(*redis.Client).Options()
	rdb := redis.NewClient(&options)
	rdb.AddHook(r.gate)
	t.Cleanup(func() { _ = rdb.Close() })
	r.shop = s.Next(t, rdb)
	r.Rebuilder = testwork.Rebuilder(t, r.shop)
	return r
}

// await waits until the rebuilder is stopped before its next call, or is done.
func (r *rival) await(t *testing.T) {
	t.Helper()
	select {
	case <-r.arrived:
	case err := <-r.done:
		r.busy = false
		t.Log("a rebuild has ended", "error", err)
	case <-time.After(60 * time.Second):
		t.Fatal("a rebuilder hangs")
	}
}

func (r *rival) step(t *testing.T) {
	t.Helper()
	r.pass <- struct{}{}
	r.await(t)
}

// claimPartition records the server of partition 0 in Postgres, as its first user does.
func claimPartition(t *testing.T, s *testshop.Shop) reservation.ServerState {
	t.Helper()
	server, err := s.Store.Inspect(t.Context(), 0)
	require.NoError(t, err)
	require.NoError(t, s.Exec(t, sql.CatalogClaimPartition, 0, server.RunID, server.ReplicationID))
	return server
}

// The first user of a partition records its server in Postgres and then in Redis. A check between the
// two closed the sale for a rebuild of nothing.
func TestFirstUseOfPartitionNeedsNoRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	server := claimPartition(t, s)
	r := newRival(t, s)
	var needs []rebuild.Need
	go func() {
		var err error
		needs, err = r.Needs(context.Background(), 1, true)
		r.done <- err
	}()
	r.busy = true
	r.await(t)
	for range 4 { // it looks more than once
		r.step(t)
		require.True(t, r.busy, "the check did not wait: %v", needs)
	}
	require.NoError(t, s.Store.MarkVerified(t.Context(), 0, server, reservation.FirstUse))
	for r.busy {
		r.step(t)
	}
	require.Empty(t, needs)
}

// Its first user may crash between the two.
func TestClaimedPartitionWithoutServerNeedsRebuild(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	claimPartition(t, s)
	needs, err := testwork.Rebuilder(t, s).Needs(t.Context(), 1, true)
	require.NoError(t, err)
	require.Equal(t, []rebuild.Need{{Reason: rebuild.ReasonServer}}, needs)
}

// twoPartitions returns a shop with a sale in each of two partitions.
func twoPartitions(t *testing.T) (s *testshop.Shop, sales [2]uuid.UUID) {
	t.Helper()
	pool, keys := testkit.Pool(t), testkit.Keys(t)
	keys.Partitions = 2
	s = testshop.NewShopOn(t, testshop.Options{Pool: pool, Keys: keys})
	for p := range sales {
		sales[p] = s.OpenIn(t, p, 10)
	}
	return s, sales
}

func sells(t *testing.T, s *testshop.Shop, sale uuid.UUID, user string) bool {
	t.Helper()
	answer, err := s.Store.Reserve(t.Context(), reservation.Request{Sale: sale, User: user, Quantity: 1})
	return err == nil && answer.Verdict == reservation.Reserved
}

// The rebuild of one partition waits for a lock in Postgres, and the other partition is rebuilt meanwhile.
func TestPartitionsAreRebuiltAtTheSameTime(t *testing.T) {
	t.Parallel()
	s, sales := twoPartitions(t)
	for p := range sales {
		require.NoError(t, s.Store.Distrust(t.Context(), p))
	}
	held := s.HoldSale(t, sales[0])
	healed := make(chan error, 1)
	go func() { healed <- testwork.Heal(t, s, testwork.Rebuilder(t, s), 2) }()
	testkit.Eventually(t, 30*time.Second, "the other partition sells", func() bool { return sells(t, s, sales[1], "ann") })
	s.RequireClosed(t, sales[0])
	s.AwaitWaiting(t, 1)
	_, err := testwork.Rebuilder(t, s).Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.ErrorIs(t, err, rebuild.ErrRunning, "each partition is rebuilt once at a time")
	require.NoError(t, held.Rollback(t.Context()))
	require.NoError(t, <-healed)
	require.True(t, sells(t, s, sales[0], "ann"))
	testwork.RequireNoNeeds(t, s, 2)
}

// The server of one partition does not answer. The other partition is checked and rebuilt before that is known.
func TestSilentPartitionDelaysNoOther(t *testing.T) {
	t.Parallel()
	s, sales := twoPartitions(t)
	silent := s.Keys.Server(0)
	silent = silent[:strings.Index(silent, "}")+1]
	answer := make(chan struct{})
	var asked atomic.Int64
	options := *s.Rdb.(*redis.Client).Options()
	rdb := redis.NewClient(&options)
	t.Cleanup(func() { _ = rdb.Close() })
	rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		for _, arg := range cmd.Args() {
			if key, ok := arg.(string); ok && strings.HasPrefix(key, silent) {
				asked.Add(1)
				<-answer
			}
		}
		return next(ctx, cmd)
	}))
	through := s.Next(t, rdb)
	require.NoError(t, s.Store.Distrust(t.Context(), 1))
	healed := make(chan error, 1)
	go func() { healed <- testwork.Heal(t, through, testwork.Rebuilder(t, through), 2) }()
	testkit.Eventually(t, 30*time.Second, "the other partition sells", func() bool { return sells(t, s, sales[1], "ann") })
	require.EqualValues(t, 1, asked.Load(), "the silent one still waits for its first answer")
	close(answer)
	<-healed // perhaps an error: the context of the first call may have ended
}

// A process rebuilds a bounded number of partitions at a time, because each takes a session of Postgres.
func TestRebuildsOfOneProcessAreBounded(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	r := testwork.Rebuilder(t, s)
	sessions := make([]*rebuild.Session, rebuild.RebuildsMax)
	for p := range sessions {
		var err error
		sessions[p], err = r.Begin(t.Context(), p)
		require.NoError(t, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for range 20 { // an attempt at Postgres would return another error
		_, err := r.Begin(ended, rebuild.RebuildsMax)
		require.Equal(t, context.Canceled, err)
	}
	sessions[0].End()
	session, err := r.Begin(t.Context(), rebuild.RebuildsMax)
	require.NoError(t, err)
	session.End()
	for _, s := range sessions[1:] {
		s.End()
	}
}
