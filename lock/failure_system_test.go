//go:build system

package lock_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
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

// A Redis without a disk loses locks on a restart, and a promoted replica those that it did not get.
// For up to a third of the lease, the old holder does not know that another one may have the lock. The new fencing
// token is larger than the forgotten ones.
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
	require.Equal(t, []string{key}, lostKeys(t, lease.Err()))
	require.ErrorIs(t, lease.Release(ctx), lock.ErrLost)
	require.Equal(t, 1, b.depth(key), "the release leaves the successor's lock alone")
	require.NoError(t, successor.Release(ctx))
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

// failover is a replicated Redis whose master can be lost.
type failover struct {
	url    string
	master func(t *testing.T, key string) *localserver.Redis
	// copied reports whether a replica of the master has the key.
	copied func(t *testing.T, key string) bool
}

func (f failover) client(t *testing.T) redis.UniversalClient {
	t.Helper()
	return testkit.Control(t, f.url)
}

func onSentinel(t *testing.T) failover {
	t.Helper()
	sentinels := testkit.OwnSentinels(t)
	return failover{
		url:    sentinels.URL,
		master: func(*testing.T, string) *localserver.Redis { return sentinels.Nodes[0] },
		copied: func(t *testing.T, key string) bool {
			t.Helper()
			replica := failover{url: sentinels.Nodes[1].URL}.client(t)
			return sentinels.InSync(t.Context(), sentinels.Nodes[1]) && replica.Exists(t.Context(), key).Val() == 1
		},
	}
}

func onCluster(t *testing.T) failover {
	t.Helper()
	cluster := testkit.OwnCluster(t)
	operator := testkit.Operate(t, cluster)
	master := func(key string) int { return operator.Master(operator.Slot(key)) }
	return failover{
		url:    cluster.URL,
		master: func(_ *testing.T, key string) *localserver.Redis { return cluster.Nodes[master(key)] },
		copied: func(t *testing.T, key string) bool {
			t.Helper()
			replica := operator.Client(operator.Replica(master(key)))
			found, err := replica.Pipelined(t.Context(), func(p redis.Pipeliner) error {
				p.ReadOnly(t.Context()) // on this connection
				p.Exists(t.Context(), key)
				return nil
			})
			return err == nil && found[1].(*redis.IntCmd).Val() == 1
		},
	}
}

// TestLockSurvivesFailover: a lock that the replica has is still held after the master is lost, its holder renews it,
// and a waiter gets it when it is released.
func TestLockSurvivesFailover(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) failover{"sentinel": onSentinel, "cluster": onCluster} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			f := start(t)
			const key = "{kept}:ann"
			holder := newLocker(t, f.client(t), lock.WithLease(20*time.Second))
			waiter := newLocker(t, f.client(t), lock.WithPoll(time.Second))
			held, err := holder.Acquire(ctx, key)
			require.NoError(t, err)
			testkit.Eventually(t, 30*time.Second, "the replica has the lock", func() bool { return f.copied(t, key) })
			got := make(chan *lock.Lease, 1)
			go func() {
				lease, err := waiter.Acquire(ctx, key)
				if err != nil {
					t.Error(err)
				}
				got <- lease
			}()
			f.master(t, key).Kill()
			rdb := f.client(t)
			before := time.Duration(0)
			testkit.Eventually(t, 30*time.Second, "the promoted server has the lock", func() bool {
				left, err := rdb.PTTL(ctx, key).Result()
				before = left
				return err == nil && left > 0
			})
			testkit.Eventually(t, 30*time.Second, "its holder renews it there", func() bool {
				left, err := rdb.PTTL(ctx, key).Result()
				renewed := err == nil && left > before
				before = left
				return renewed
			})
			require.NoError(t, held.Err())
			select {
			case <-got:
				t.Fatal("two owners hold the lock")
			default:
			}
			require.NoError(t, held.Release(ctx))
			lease := <-got
			require.NoError(t, lease.Release(ctx))
		})
	}
}

// A lock that may vanish is not on the replica, so it is free when the master is lost, and its holder learns of it.
func TestVanishingLockIsFreeAfterFailover(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) failover{"sentinel": onSentinel, "cluster": onCluster} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			f := start(t)
			const key, mark = "{vanishing}:ann", "{vanishing}:mark"
			rdb := f.client(t)
			catchUp := func(mark string) {
				t.Helper()
				require.NoError(t, rdb.Set(ctx, mark, "", 0).Err())
				testkit.Eventually(t, 30*time.Second, "the replica is up to date", func() bool { return f.copied(t, mark) })
			}
			catchUp(mark) // a replica that is new gets all that there is
			holder := newLocker(t, f.client(t), lock.MayVanish(), lock.WithLease(5*time.Second))
			held, err := holder.Acquire(ctx, key)
			require.NoError(t, err)
			catchUp(mark + " later")
			require.False(t, f.copied(t, key))
			f.master(t, key).Kill()
			testkit.Eventually(t, 60*time.Second, "another one has the lock on the promoted server", func() bool {
				next, err := newLocker(t, rdb, lock.MayVanish()).TryAcquire(ctx, key)
				if err != nil {
					return false
				}
				return next.Release(ctx) == nil
			})
			testkit.Eventually(t, 30*time.Second, "its holder learns of it", func() bool {
				return errors.Is(held.Err(), lock.ErrLost)
			})
		})
	}
}

func TestWaiterSurvivesARestartOfRedis(t *testing.T) {
	t.Run("that begins before the call", func(t *testing.T) {
		server, b := ownServer(t)
		ctx, key := t.Context(), b.key("ann")
		server.Kill()
		var o outageCounter
		l := newLocker(t, b.rdb, o.option())
		const callers = 4
		var waiting []<-chan *lock.Lease
		for range callers {
			waiting = append(waiting, acquiring(t, l, key))
		}
		o.wait(t, callers+3)
		_, err := l.TryAcquire(ctx, key)
		require.ErrorIs(t, err, syscall.ECONNREFUSED, "TryAcquire does not wait for Redis")
		_, _, err = l.TryEach(ctx, []string{key})
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.NoError(t, server.Restart(ctx))
		for range callers {
			require.NoError(t, b.first(waiting).Release(ctx))
		}
		assert.Zero(t, b.depth(key))
	})
	t.Run("while it reenters", func(t *testing.T) {
		server, b := ownServer(t)
		ctx, key := t.Context(), b.key("ann")
		var o outageCounter
		l := newLocker(t, b.rdb, o.option())
		held, err := l.Acquire(ctx, key, lock.For(time.Minute))
		require.NoError(t, err)
		server.Kill()
		deeper := make(chan *lock.Lease, 1)
		go func() {
			lease, err := l.Acquire(held.Context(ctx), key, lock.For(lock.MaxLease))
			assert.NoError(t, err)
			deeper <- lease
		}()
		o.wait(t, 2)
		require.NoError(t, server.Restart(ctx))
		lease := await(t, deeper, startsWithin, "the longer lease")
		assert.Greater(t, b.rdb.PTTL(ctx, key).Val(), time.Minute)
		require.NoError(t, lease.Release(ctx))
		require.NoError(t, held.Release(ctx))
	})
	t.Run("on several servers", func(t *testing.T) {
		t.Parallel()
		var nodes []*lock.Locker
		var benches []bench
		var restarts []func()
		for range 3 {
			server := testkit.OwnRedis(t)
			b := benchOn(t, server)
			benches = append(benches, b)
			nodes = append(nodes, b.Locker)
			server.Kill()
			restarts = append(restarts, func() { require.NoError(t, server.Restart(t.Context())) })
		}
		multi, err := lock.NewMulti(nodes)
		require.NoError(t, err)
		short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err = multi.Acquire(short, "ann")
		require.ErrorIs(t, err, lock.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)

		got := make(chan *lock.MultiLease, 1)
		go func() {
			lease, err := multi.Acquire(t.Context(), "ann")
			assert.NoError(t, err)
			got <- lease
		}()
		restarts[0]()
		restarts[1]()
		lease := await(t, got, startsWithin, "the lock of two of three")
		require.NoError(t, lease.Release(t.Context()))
		testkit.Eventually(t, startsWithin, "the release on both", func() bool {
			return benches[0].depth("ann")+benches[1].depth("ann") == 0
		})
	})
}

// A Redis that restarts with much data is loading and serves no calls meanwhile.
func TestWaiterWaitsWhileRedisLoadsItsData(t *testing.T) {
	t.Parallel()
	server, err := localserver.StartRedis(t.Context(), localserver.RedisOptions{Settings: map[string]string{
		"appendonly": "no", "key-load-delay": "1000", "loading-process-events-interval-bytes": "1024",
	}})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	b := benchOn(t, server)
	ctx := t.Context()
	const fill = "for i = 1, 1000 do redis.call('SET', 'filler:' .. i, string.rep('x', 1000)) end return 1"
	require.NoError(t, b.rdb.Eval(ctx, fill, nil).Err())
	require.NoError(t, b.rdb.Save(ctx).Err())
	var loading atomic.Int64
	l := newLocker(t, b.rdb, lock.WithObserver(lock.Observer{Unreachable: func(_ int, err error) {
		if redis.IsLoadingError(err) {
			loading.Add(1)
		}
	}}))
	server.Kill()
	waiting := acquiring(t, l, b.key("ann"))
	require.NoError(t, server.Restart(ctx))
	require.NoError(t, await(t, waiting, startsWithin, "the lock").Release(ctx))
	assert.Positive(t, loading.Load(), "Redis was not seen loading: the test shows nothing")
}

// orders returns all interleavings of two sequences.
func orders(some, other int) [][]bool {
	var all [][]bool
	switch {
	case some == 0 || other == 0:
		return [][]bool{slices.Concat(slices.Repeat([]bool{false}, some), slices.Repeat([]bool{true}, other))}
	default:
		for _, rest := range orders(some-1, other) {
			all = append(all, append([]bool{false}, rest...))
		}
		for _, rest := range orders(some, other-1) {
			all = append(all, append([]bool{true}, rest...))
		}
	}
	return all
}

// All attempts of an acquire are held back, and all attempts to release what it may have taken.
func TestAbandonedAcquireLeavesNoLockInAnyOrderOfArrival(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	prefix := b.key("locker")
	n, slow := slowNetTo(t, b.rdb)
	held := b.take(ctx, time.Minute, b.key("cid"))
	for name, acquire := range map[string]func(ctx context.Context, l *lock.Locker) error{
		"Acquire": func(ctx context.Context, l *lock.Locker) error {
			_, err := l.Acquire(ctx, b.key("ann"))
			return err
		},
		"AcquireAll": func(ctx context.Context, l *lock.Locker) error {
			_, err := l.AcquireAll(ctx, []string{b.key("ann"), b.key("bob")}, lock.For(time.Hour))
			return err
		},
		"TryEach": func(ctx context.Context, l *lock.Locker) error {
			_, _, err := l.TryEach(ctx, []string{b.key("ann"), b.key("bob"), b.key("cid")}, lock.For(time.Hour))
			return err
		},
	} {
		once, giveUp := context.WithCancel(ctx)
		defer giveUp()
		// A waiter gives up after its first attempt.
		l := lock.New(slow, lock.WithPrefix(prefix), lock.WithObserver(lock.Observer{Unreachable: func(int, error) {
			giveUp()
		}}))
		n.keepNext(1000)
		require.Error(t, acquire(once, l))
		require.NoError(t, l.Close(ctx)) // until then it retries the release
		calls := n.first(t, 4)
		acquires, releases := calls[:2], calls[2:]
		require.Equal(t, acquires[0], acquires[1])
		require.Equal(t, releases[0], releases[1])
		for _, order := range orders(2, 2) {
			taken := false
			for _, release := range order {
				if release {
					n.deliver(t, releases[0])
				} else {
					n.deliver(t, acquires[0])
				}
				taken = taken || b.depth(b.key("ann")) > 0
			}
			assert.Equal(t, !order[0], taken, "%s: a call that arrives before the release takes the lock", name)
			for _, key := range []string{"ann", "bob"} {
				assert.Zero(t, b.depth(b.key(key)), "%s leaves a lock when the releases arrive at %v", name, order)
			}
			left, err := b.rdb.Keys(ctx, prefix+":receipt:*").Result()
			require.NoError(t, err)
			require.Len(t, left, 1)
			require.NoError(t, b.rdb.Del(ctx, left...).Err()) // restores the state before
		}
	}
	require.Equal(t, 1, b.depth(b.key("cid")))
	require.NoError(t, held.Release(ctx))
}

// No open connection is left for a release while Redis hangs: a new one waits for Redis to answer
// HELLO.
func TestAbandonedLockIsReleasedWhenRedisAnswersAgain(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease} {
		require.NoError(t, script.Load(ctx, b.rdb).Err())
	}
	slow := redis.NewClient(&redis.Options{
		Addr: b.rdb.Options().Addr, ReadTimeout: 200 * time.Millisecond, MaxRetries: -1,
		DialTimeout: 50 * time.Millisecond, DialerRetries: 1,
	})
	t.Cleanup(func() { _ = slow.Close() })
	testkit.Eventually(t, startsWithin, "the only open connection", func() bool { return slow.Ping(ctx).Err() == nil })
	l := newLocker(t, slow)
	calls := func() (n int) {
		stats, err := b.rdb.Info(ctx, "commandstats").Result()
		require.NoError(t, err)
		_, calls, _ := strings.Cut(stats, "cmdstat_evalsha:calls=")
		calls, _, _ = strings.Cut(calls, ",")
		n, _ = strconv.Atoi(calls) // 0 before the first call
		return n
	}
	require.Zero(t, calls())

	server.Freeze()
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := l.Acquire(short, key, lock.For(lock.MaxLease))
	require.ErrorIs(t, err, lock.ErrBusy)
	server.Thaw()
	testkit.Eventually(t, startsWithin, "the acquire and the release arrive", func() bool {
		return calls() >= 2 && b.depth(key) == 0
	})
}
