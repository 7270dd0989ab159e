//go:build system

package lock_test

import (
	"context"
	"fmt"
	mathrand "math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestCloseWithoutRedisEndsLeasesAndReturnsOnDeadline(t *testing.T) {
	for name, hangs := range map[string]bool{"Redis is killed": false, "Redis hangs": true} {
		t.Run(name, func(t *testing.T) {
			server, b := ownServer(t)
			const leases = 64 // more than Close releases at the same time
			l := lock.New(b.rdb, lock.WithLease(lock.MaxLease))
			inside := make([]context.Context, leases)
			names := b.names(leases)
			for i, key := range names {
				lease, err := l.Acquire(t.Context(), key)
				require.NoError(t, err)
				inside[i] = lease.Context(t.Context())
			}
			if hangs {
				server.Freeze()
			} else {
				server.Kill()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			closed := make(chan error, 1)
			go func() { closed <- l.Close(ctx) }()
			err := await(t, closed, startsWithin, "Close returns") // the client's timeout is 3 s, for several attempts
			require.Error(t, err)
			require.NotErrorIs(t, err, lock.ErrLost, "the outcome is unknown")
			if hangs {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			for _, held := range inside {
				require.ErrorIs(t, context.Cause(held), lock.ErrClosed, "its holder does not wait for Redis")
			}
			_, err = l.Acquire(t.Context(), names[0])
			require.ErrorIs(t, err, lock.ErrClosed)
			if hangs {
				server.Thaw()
				testkit.Eventually(t, startsWithin, "Redis answers again", func() bool {
					return b.rdb.Ping(t.Context()).Err() == nil
				})
			}
		})
	}
}

func TestCloseRetriesFailedReleases(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	l := lock.New(b.rdb)
	lease, err := l.Acquire(ctx, b.key("ann"), lock.For(lock.MaxLease))
	require.NoError(t, err)
	server.Kill()
	require.Error(t, lease.Release(ctx))
	require.NoError(t, server.Restart(ctx))
	require.Equal(t, 1, b.depth(b.key("ann")), "this Redis writes every command to disk")
	require.NoError(t, l.Close(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestDoReleasesItsLockAfterAnOutage(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	err := b.Do(ctx, b.key("ann"), func(context.Context) error {
		server.Kill()
		return nil
	}, lock.For(lock.MaxLease))
	require.Error(t, err)
	require.NoError(t, server.Restart(ctx))
	testkit.Eventually(t, startsWithin, "the lock is released", func() bool { return b.depth(b.key("ann")) == 0 })
}

func TestAcceptedIncrementsAllCount(t *testing.T) {
	b, seed := setup(t), mathrand.Uint64()
	t.Logf("seed=%d", seed)
	r := crowd(b, testkit.Pool(t), seed, 12, 25, 12)
	t.Logf("%d increments accepted, %d requests refused", r.accepted, r.refused)
	assert.Equal(t, r.accepted, r.value(t))
	assert.Positive(t, r.refused, "no client was late: the test shows nothing")
}

func TestLockerLeavesFewKeysWithExpiry(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	prefix := b.key("locker")
	b.Locker = newLocker(t, b.rdb, lock.WithPrefix(prefix))
	for range 20 {
		outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
		_, err := b.TryAcquire(ctx, b.key("ann"))
		require.ErrorIs(t, err, lock.ErrBusy)
		inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
		require.NoError(t, outer.Release(ctx))
		require.NoError(t, inner.Release(ctx))
	}

	left, err := b.rdb.Keys(ctx, prefix+"*").Result()
	require.NoError(t, err)
	assert.Contains(t, left, prefix+":fence")
	assert.Len(t, left, 3, "receipts are reused: %v", left)
	for _, key := range left {
		ttl := b.rdb.PTTL(ctx, key).Val()
		assert.Positive(t, ttl, key)
		assert.LessOrEqual(t, ttl, 24*time.Hour, key)
	}
}

func TestTryEachTakesOneCallForEvery512Keys(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	var calls atomic.Int64
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			calls.Add(1)
		}
		return next(ctx, cmd)
	}))
	names := b.names(10_000)
	other := b.take(ctx, time.Minute, names[9_999])

	calls.Store(0)
	lease, busy, err := b.TryEach(ctx, names, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{names[9_999]}, busy)
	assert.Equal(t, names[:9_999], lease.Keys())
	assert.EqualValues(t, 20, calls.Load())

	require.NoError(t, lease.Release(ctx))
	assert.LessOrEqual(t, calls.Load(), int64(41), "and one NOSCRIPT at most")
	require.NoError(t, other.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}

// The leases are held for longer than their length. Two rounds of renewals are at least a twentieth
// of the lease apart, on any machine, because a round includes what is due in that time. Only the
// last call of a round names fewer than 256 locks.
func TestTenThousandLeasesNeedFewCallsAndGoroutines(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const (
		locks, callers  = 10_000, 16
		length          = 8 * time.Second
		renewalsPerCall = 256
		closeCalls      = 16
		together        = length / 20
		// due is the shortest time between two renewals of a lock: a third of the lease, less the
		// drift and the batch window.
		due = length/3 - length/100 - 2*time.Millisecond - together
	)
	c := countCalls(t, b.rdb)
	var underWay, atOnce atomic.Int64 // releases
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			now := underWay.Add(1)
			defer underWay.Add(-1)
			for was := atOnce.Load(); now > was && !atOnce.CompareAndSwap(was, now); was = atOnce.Load() {
			}
		}
		return next(ctx, cmd)
	})
	l := newLocker(t, b.rdb, lock.WithLease(length))
	names := b.names(locks)
	leases := make([]*lock.Lease, locks)
	var all sync.WaitGroup
	for caller := range callers {
		all.Go(func() {
			for i := caller; i < locks; i += callers {
				var err error
				if leases[i], err = l.Acquire(ctx, names[i]); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	require.False(t, t.Failed())
	held := leases[0].Context(ctx)

	began, before := time.Now(), len(c.renewedKeys())
	goroutines := 0
	testkit.Eventually(t, length+startsWithin, "a whole lease", func() bool {
		goroutines = max(goroutines, runtime.NumGoroutine()) // of all running tests
		return time.Since(began) > length
	})
	sizes := c.renewedKeys()
	window := time.Since(began)
	for _, lease := range leases {
		require.NoError(t, lease.Err())
	}
	require.NoError(t, held.Err())
	there, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	require.EqualValues(t, locks, there)
	assert.Less(t, goroutines, locks/4)

	calls, keys := len(sizes)-before, 0
	for _, size := range sizes[before:] {
		keys += size
	}
	t.Logf("%d calls for %d renewals in %v, %d goroutines", calls, keys, window, goroutines)
	assert.LessOrEqual(t, slices.Max(sizes), renewalsPerCall)
	assert.GreaterOrEqual(t, keys, locks, "each at least once in a lease")
	assert.LessOrEqual(t, keys, locks*int(window/due+2), "about every third of a lease at most")
	rounds := int(window/together) + 3 // the window cuts the rounds at its ends
	assert.LessOrEqual(t, calls, keys/renewalsPerCall+rounds)

	if err := l.Close(ctx); err != nil { // on a slow machine, some leases end before their release
		require.ErrorIs(t, err, lock.ErrLost)
	}
	assert.Equal(t, locks, c.calls(releaseCalls))
	assert.LessOrEqual(t, atOnce.Load(), int64(closeCalls), "Close leaves connections for others")
	there, err = b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, there)
	require.ErrorIs(t, context.Cause(held), lock.ErrClosed)
}

// holdElsewhere starts a process that holds the lock of a key, and returns it with its token; see
// command.
func holdElsewhere(t *testing.T, key string, lease time.Duration) (*testkit.Cmd, int64) {
	t.Helper()
	holder := testkit.Command(t, "hold", key)
	holder.Input()
	holder.Setenv("REDIS_URL", testkit.RedisURL(t))
	holder.Setenv("LOCK_LEASE", lease.String())
	holder.Start()
	var token int64
	_, err := fmt.Sscanf(holder.WaitOutput(startsWithin, "held token="), "held token=%d", &token)
	require.NoError(t, err)
	return holder, token
}

// All times are Redis's: leases end by its clock, and tokens are its time in microseconds.
func TestSuccessorsOfAKilledHolderWaitForTheEndOfItsLease(t *testing.T) {
	b := setup(t)
	key := b.key("ann")
	const lease = 6 * time.Second
	holder, token := holdElsewhere(t, key, lease)
	acquired := b.expiry(key)

	// One waiter knows when the lease ends, the others poll.
	var waiting []<-chan *lock.Lease
	for _, poll := range []time.Duration{never, 10 * time.Millisecond, 10 * time.Millisecond} {
		waiting = append(waiting, acquiring(t, newLocker(t, b.rdb, lock.WithPoll(poll)), key))
	}
	b.waitListening(key, int64(len(waiting)))
	b.waitRenewed(key, acquired)
	for _, leases := range waiting {
		require.Empty(t, leases, "the watchdog renews the lock")
	}

	holder.Kill()
	ends, killed := b.expiry(key), b.now()
	require.LessOrEqual(t, ends.Sub(killed), lease)
	var tokens []int64
	for range waiting {
		var first *lock.Lease
		testkit.Eventually(t, lease+startsWithin, "a successor", func() bool {
			for _, leases := range waiting {
				if len(leases) > 0 {
					first = <-leases
					return true
				}
			}
			return false
		})
		tokens = append(tokens, first.Token(key))
		require.NoError(t, first.Release(t.Context()))
	}
	require.True(t, slices.IsSorted(tokens), "%d", tokens)
	assert.Greater(t, tokens[0], token)
	assert.Greater(t, tokens[0], ends.UnixMicro(), "the first successor came before the end of the lease")
	assert.Less(t, tokens[0], ends.Add(startsWithin).UnixMicro(), "the first successor came late")
}

func TestFrozenHolderLearnsOfItsLossBeforeItWrites(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	key := b.key("ann")
	const lease = 2 * time.Second
	victim, token := holdElsewhere(t, key, lease)
	victim.WriteLine("look")
	victim.WaitOutput(startsWithin, "look: <nil>")
	successors := acquiring(t, newLocker(t, b.rdb, lock.WithPoll(never)), key, lock.For(time.Minute))
	b.waitListening(key, 1)
	victim.Freeze()
	ends := b.expiry(key)
	successor := await(t, successors, lease+startsWithin, "the lock of a frozen holder")
	assert.Greater(t, successor.Token(key), ends.UnixMicro(), "the successor came before the end of the lease")
	require.Greater(t, successor.Token(key), token)

	// The victim runs these commands as soon as it continues.
	victim.WriteLine("look again")
	victim.WriteLine("release")
	victim.Thaw()
	for _, line := range []string{"look again", "ended", "release"} {
		require.Equal(t, line+": lock lost: "+key, victim.WaitOutput(startsWithin, line+": "))
	}
	require.Equal(t, 1, b.depth(key), "the victim's release leaves the successor's lock alone")
	require.NoError(t, successor.Err())
	require.NoError(t, successor.Release(ctx))
}

func TestClusterLocks(t *testing.T) {
	rdb := startCluster(t, 3)

	t.Run("a waiter is woken on every node", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		holder := newLocker(t, rdb)
		waiter := newLocker(t, rdb, lock.WithPoll(10*time.Minute))
		for _, key := range []string{"ann", "bob", "cid", "{0}:lock:ann", "{1}:lock:ann", "a{2}b{3}"} {
			lease, err := holder.Acquire(ctx, key, lock.For(10*time.Minute))
			require.NoError(t, err, key)
			got := make(chan error, 1)
			go func() {
				second, err := waiter.Acquire(ctx, key)
				if err == nil {
					err = second.Release(ctx)
				}
				got <- err
			}()
			testkit.Eventually(t, startsWithin, "a listener for "+key, func() bool {
				var listening atomic.Int64 // the nodes are asked in parallel
				require.NoError(t, rdb.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
					channels, err := node.PubSubShardChannels(ctx, "*"+key+"*").Result()
					listening.Add(int64(len(channels)))
					return err
				}))
				return listening.Load() == 1
			})
			require.NoError(t, lease.Release(ctx), key)
			require.NoError(t, <-got, key)
		}
	})

	t.Run("locks of many slots are renewed", func(t *testing.T) {
		ctx := t.Context()
		const locks = 60
		lease := 2 * time.Second
		l := newLocker(t, rdb, lock.WithLease(lease))
		var leases []*lock.Lease
		for i := range locks {
			got, err := l.Acquire(ctx, fmt.Sprintf("renewed-%d", i))
			require.NoError(t, err)
			leases = append(leases, got)
		}
		began := rdb.Time(ctx).Val()
		testkit.Eventually(t, 30*time.Second, "three leases", func() bool { return rdb.Time(ctx).Val().Sub(began) > 3*lease })
		for i, got := range leases {
			require.NoError(t, got.Err())
			require.EqualValues(t, 1, rdb.Exists(ctx, fmt.Sprintf("renewed-%d", i)).Val())
			require.NoError(t, got.Release(ctx))
		}
	})

	t.Run("keys with one hash tag share a call", func(t *testing.T) {
		ctx := t.Context()
		l := newLocker(t, rdb)
		lease, err := l.AcquireAll(ctx, []string{"{7}:ann", "{7}:bob"})
		require.NoError(t, err)
		each, busy, err := l.TryEach(ctx, []string{"{7}:bob", "{7}:cid"}, lock.For(time.Minute))
		require.NoError(t, err)
		assert.Equal(t, []string{"{7}:bob"}, busy)
		assert.Equal(t, []string{"{7}:cid"}, each.Keys())
		assert.Greater(t, each.Token("{7}:cid"), lease.Token("{7}:ann"))
		forced, err := l.ForceRelease(ctx, "{7}:cid")
		require.NoError(t, err)
		assert.True(t, forced)
		require.ErrorIs(t, each.Release(ctx), lock.ErrLost)
		require.NoError(t, lease.Release(ctx))

		_, err = l.AcquireAll(ctx, []string{"{7}:ann", "{8}:bob"})
		require.ErrorIs(t, err, lock.ErrInvalid)
		assert.ErrorContains(t, err, "share a hash tag")
	})
}
