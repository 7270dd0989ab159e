package rebuild_test

import (
	"context"
	"net"
	"strings"
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
