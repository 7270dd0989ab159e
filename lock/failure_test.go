//go:build system

package lock_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
	"stampede/lua"
)

// overdue is how late a loss may be reported on a busy machine. It is short beside the leases here,
// so that a test can tell why it was reported.
const overdue = 3 * time.Second

func TestLocksSurviveARestartWithData(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	const length = 6 * time.Second
	var failed atomic.Int64
	keeper := newLocker(t, b.rdb, lock.WithLease(length), lock.WithObserver(lock.Observer{
		Renewed: func(_ int, _ time.Duration, err error) {
			if err != nil {
				failed.Add(1)
			}
		},
	}))
	lease, err := keeper.Acquire(ctx, key)
	require.NoError(t, err)
	held := lease.Context(ctx)

	server.Kill()
	testkit.Eventually(t, startsWithin, "a failed renewal", func() bool { return failed.Load() > 0 })
	require.NoError(t, lease.Err(), "the lock may still be in Redis")
	require.NoError(t, server.Restart(ctx))

	restored := b.expiry(key)
	b.waitRenewed(key, restored)
	_, err = b.TryAcquire(ctx, key)
	require.ErrorIs(t, err, lock.ErrBusy)
	testkit.Eventually(t, length+startsWithin, "the end of the lease granted before the outage", func() bool {
		return b.now().After(restored)
	})
	require.NoError(t, lease.Err())
	require.NoError(t, held.Err())

	waiting := acquiring(t, b.Locker, key)
	b.waitListening(key, 1)
	require.NoError(t, lease.Release(ctx))
	next := await(t, waiting, startsWithin, "the lock after the outage")
	assert.Greater(t, next.Token(key), lease.Token(key))
	require.NoError(t, next.Release(ctx))
}

func TestOutageIsNotALoss(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"))
	server.Kill()

	_, _, err := b.TryEach(ctx, []string{b.key("bob")}, lock.For(time.Minute))
	require.Error(t, err)
	err = lease.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost, "the outcome is unknown")

	require.NoError(t, server.Restart(ctx))
	require.NoError(t, lease.Release(ctx), "this Redis writes every command to disk")
	assert.Zero(t, b.depth(b.key("ann")))
}

// The loss is reported when the lease ends and not before: until then Redis may come back with the
// lock.
func TestOutageLongerThanTheLeaseIsALoss(t *testing.T) {
	server, b := ownServer(t)
	const length = 3 * time.Second
	lease, err := newLocker(t, b.rdb, lock.WithLease(length)).Acquire(t.Context(), b.key("ann"))
	require.NoError(t, err)
	held := lease.Context(t.Context())
	server.Kill()
	killed := time.Now()
	reported := awaitLoss(t, held, length+startsWithin)
	assert.Greater(t, reported.Sub(killed), length/2, "most of the lease was left")
	require.ErrorIs(t, lease.Err(), lock.ErrLost)

	require.NoError(t, server.Restart(t.Context()))
	next, err := b.Acquire(t.Context(), b.key("ann"))
	require.NoError(t, err)
	assert.Greater(t, next.Token(b.key("ann")), lease.Token(b.key("ann")))
	require.ErrorIs(t, lease.Release(t.Context()), lock.ErrLost)
	require.Equal(t, 1, b.depth(b.key("ann")))
}

// A Redis without a disk loses locks on a restart. For up to a third of the lease, the old holder
// does not know that another one may have the lock. The new fencing token is larger than those that
// Redis has forgotten.
func TestWatchdogFindsAnEmptyRedis(t *testing.T) {
	server, b := forgetfulServer(t)
	ctx := t.Context()
	key := b.key("ann")
	const length = 6 * time.Second
	lease, err := newLocker(t, b.rdb, lock.WithLease(length)).Acquire(ctx, key)
	require.NoError(t, err)
	acquired := time.Now()
	held := lease.Context(ctx)

	server.Kill()
	require.NoError(t, server.Restart(ctx))
	back := time.Now()
	require.Zero(t, b.rdb.DBSize(ctx).Val(), "this Redis stores nothing")
	successor, err := b.TryAcquire(ctx, key, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Greater(t, successor.Token(key), lease.Token(key))

	reported := awaitLoss(t, held, length+startsWithin)
	assert.Less(t, reported.Sub(acquired), length*9/10, "found by a renewal, not by the end of the lease")
	assert.Less(t, reported.Sub(back), length/3+overdue, "found by the first renewal after the restart")
	var lost *lock.LostError
	require.ErrorAs(t, lease.Err(), &lost)
	assert.Equal(t, []string{key}, lost.Keys)
	require.ErrorIs(t, lease.Release(ctx), lock.ErrLost)
	require.Equal(t, 1, b.depth(key), "the release leaves the successor's lock alone")
	require.NoError(t, successor.Release(ctx))
}

// No watchdog finds the loss: the lease is explicit.
func TestReleaseFindsAnEmptyRedis(t *testing.T) {
	server, b := forgetfulServer(t)
	lease := b.take(t.Context(), time.Minute, b.key("ann"))
	server.Kill()
	require.NoError(t, server.Restart(t.Context()))
	assert.True(t, lease.Holds(b.key("ann")), "Holds reads only the clock")
	require.ErrorIs(t, lease.Release(t.Context()), lock.ErrLost)
}

func TestLossIsReportedInTimeWhileRedisHangs(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	const length = 3 * time.Second
	options := *b.rdb.Options()
	options.ReadTimeout = never
	patient := redis.NewClient(&options)
	t.Cleanup(func() { _ = patient.Close() })
	keeper := newLocker(t, patient, lock.WithLease(length))
	lease, err := keeper.Acquire(ctx, key)
	require.NoError(t, err)
	held := lease.Context(ctx)
	b.waitRenewed(key, b.expiry(key))

	server.Freeze()
	frozen := time.Now()
	reported := awaitLoss(t, held, startsWithin) // Redis answers nothing until Thaw
	assert.Greater(t, reported.Sub(frozen), length/2, "the lock was held until then")
	// The report does not wait for the client's timeout.
	require.ErrorIs(t, lease.Err(), lock.ErrLost)

	server.Thaw()
	next, err := b.Acquire(ctx, key)
	require.NoError(t, err)
	assert.Greater(t, next.Token(key), lease.Token(key))
	require.ErrorIs(t, lease.Release(ctx), lock.ErrLost)
	require.Equal(t, 1, b.depth(key), "neither late renewals nor the release touch the successor's lock")
	require.NoError(t, next.Release(ctx))
}

func TestShortHangOfRedisIsNotALoss(t *testing.T) {
	server, b := ownServer(t)
	key := b.key("ann")
	const length = 3 * time.Second
	var sent, answered atomic.Int64
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		sent.Add(1)
		defer answered.Add(1)
		return next(ctx, cmd)
	}))
	keeper := newLocker(t, b.rdb, lock.WithLease(length))
	lease, err := keeper.Acquire(t.Context(), key)
	require.NoError(t, err)
	before := b.expiry(key)

	server.Freeze()
	require.Equal(t, sent.Load(), answered.Load())
	testkit.Eventually(t, length+startsWithin, "a renewal in progress",
		func() bool { return sent.Load() > answered.Load() })
	server.Thaw()
	b.waitRenewed(key, before)
	testkit.Eventually(t, length+startsWithin, "the end of the first lease", func() bool { return b.now().After(before) })
	require.NoError(t, lease.Err())
	require.NoError(t, lease.Release(t.Context()))
}

// Only a message or the check after a new subscription can wake the waiter: the lease and the poll
// are longer than the test.
func TestWaiterGetsTheLockAfterABrokenSubscription(t *testing.T) {
	start := func(b bench) (lease *lock.Lease, waiting <-chan *lock.Lease) {
		t.Helper()
		lease = b.take(b.t.Context(), lock.MaxLease, b.key("ann"))
		waiting = acquiring(b.t, newLocker(b.t, b.rdb, lock.WithPoll(never)), b.key("ann"))
		b.waitListening(b.key("ann"), 1)
		return lease, waiting
	}
	finish := func(b bench, waiting <-chan *lock.Lease) {
		t.Helper()
		next := await(b.t, waiting, startsWithin, "the lock")
		require.NoError(b.t, next.Release(b.t.Context()))
	}

	t.Run("before the release", func(t *testing.T) {
		_, b := ownServer(t)
		lease, waiting := start(b)
		killed, err := b.rdb.ClientKillByFilter(t.Context(), "TYPE", "pubsub").Result()
		require.NoError(t, err)
		require.EqualValues(t, 1, killed)
		b.waitListening(b.key("ann"), 1)
		require.Empty(t, waiting)
		require.NoError(t, lease.Release(t.Context()))
		finish(b, waiting)
	})
	t.Run("and the release fell into the gap", func(t *testing.T) {
		_, b := ownServer(t)
		_, waiting := start(b)
		// A release, in one step with the end of the connection that listens for it.
		var killed, receivers *redis.IntCmd
		_, err := b.rdb.TxPipelined(t.Context(), func(tx redis.Pipeliner) error {
			killed = tx.ClientKillByFilter(t.Context(), "TYPE", "pubsub")
			tx.Del(t.Context(), b.key("ann"))
			receivers = tx.Publish(t.Context(), releaseChannel(b.key("ann")), "0")
			return nil
		})
		require.NoError(t, err)
		require.EqualValues(t, 1, killed.Val())
		require.Zero(t, receivers.Val(), "a connection received the message: the test shows nothing")
		finish(b, waiting)
	})
	t.Run("with Redis, which came back with the lock", func(t *testing.T) {
		server, b := ownServer(t)
		lease, waiting := start(b)
		server.Kill()
		require.NoError(t, server.Restart(t.Context()))
		b.waitListening(b.key("ann"), 1)
		require.Empty(t, waiting)
		require.NoError(t, lease.Release(t.Context()))
		finish(b, waiting)
	})
	t.Run("with Redis, which came back empty", func(t *testing.T) {
		server, b := forgetfulServer(t)
		lease, waiting := start(b)
		server.Kill()
		require.NoError(t, server.Restart(t.Context()))
		finish(b, waiting)
		require.ErrorIs(t, lease.Release(t.Context()), lock.ErrLost)
	})
}

// Replication is asynchronous. A lock that reached the replica is still held after its promotion. A
// lock that did not is lost: its holder learns that at the next renewal, and another process may
// take it before. Their fencing tokens tell the two holders apart. The later token is larger
// because the servers' clocks agree, although the replica does not know the last token.
func TestPromotedReplicaKeepsReplicatedLocks(t *testing.T) {
	primary, p := forgetfulServer(t)
	replica, err := localserver.StartRedis(t.Context(),
		localserver.RedisOptions{Settings: map[string]string{"appendonly": "no"}})
	require.NoError(t, err)
	t.Cleanup(replica.Stop)
	r := benchOn(t, replica)
	ctx := t.Context()
	require.NoError(t, p.rdb.ConfigSet(ctx, "repl-diskless-sync-delay", "0").Err())
	host, port, err := net.SplitHostPort(p.rdb.Options().Addr)
	require.NoError(t, err)
	require.NoError(t, r.rdb.ReplicaOf(ctx, host, port).Err())

	// The client looks up the primary for each connection.
	var addr atomic.Value
	addr.Store(p.rdb.Options().Addr)
	moving := redis.NewClient(&redis.Options{
		DialerRetries: 1, PoolSize: manyDials,
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr.Load().(string))
		},
	})
	t.Cleanup(func() { _ = moving.Close() })
	const length = 6 * time.Second
	l := newLocker(t, moving, lock.WithLease(length))

	// ann's lock reaches the replica and bob's does not, because the replica has lost its primary.
	ann, bob := p.key("ann"), p.key("bob")
	annLease, err := l.Acquire(ctx, ann)
	require.NoError(t, err)
	waiting := acquiring(t, newLocker(t, moving, lock.WithPoll(never)), ann)
	p.waitListening(ann, 1)
	testkit.Eventually(t, startsWithin, "replication of the lock", func() bool { return r.depth(ann) == 1 })
	require.NoError(t, r.rdb.ReplicaOf(ctx, "127.0.0.1", "1").Err())
	bobLease, err := l.Acquire(ctx, bob)
	require.NoError(t, err)
	bobHeld := bobLease.Context(ctx)
	require.Zero(t, r.depth(bob))

	primary.Kill()
	require.NoError(t, r.rdb.ReplicaOf(ctx, "NO", "ONE").Err())
	known, err := r.rdb.ScriptExists(ctx, lua.LockAcquire.Hash(), lua.LockRenew.Hash()).Result()
	require.NoError(t, err)
	require.Equal(t, []bool{false, false}, known, "a replica does not know the scripts")
	addr.Store(r.rdb.Options().Addr)
	promoted := time.Now()

	// Until the first holder learns of the loss, there can be two.
	second, err := r.TryAcquire(ctx, bob, lock.For(time.Minute))
	require.NoError(t, err)
	require.NoError(t, bobLease.Err(), "the loss is not known yet")
	assert.Greater(t, second.Token(bob), bobLease.Token(bob), "the store can tell them apart")

	reported := awaitLoss(t, bobHeld, length+startsWithin)
	assert.Less(t, reported.Sub(promoted), length/3+overdue, "found by the first renewal, not by the end of the lease")
	require.ErrorIs(t, bobLease.Release(ctx), lock.ErrLost)
	require.Equal(t, 1, r.depth(bob), "the release leaves the successor's lock alone")
	require.NoError(t, second.Release(ctx))

	// ann's lock and its waiter survive.
	_, err = r.TryAcquire(ctx, ann)
	require.ErrorIs(t, err, lock.ErrBusy)
	r.waitRenewed(ann, r.expiry(ann))
	require.NoError(t, annLease.Err())
	require.Empty(t, waiting)
	r.waitListening(ann, 1)
	require.NoError(t, annLease.Release(ctx))
	next := await(t, waiting, startsWithin, "the lock from the new primary")
	assert.Greater(t, next.Token(ann), annLease.Token(ann))
	assert.Greater(t, next.Token(ann), second.Token(bob), "tokens keep growing on the new primary")
	require.NoError(t, next.Release(ctx))
}
