package lock_test

import (
	"bytes"
	"context"
	"net"
	"os"
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
	"stampede/lua"
)

// slowNet forwards what clients send to Redis and can hold back script calls, as a slow network
// does: the client times out, and Redis gets the call later, in any order.
type slowNet struct {
	addr string

	mu      sync.Mutex
	keeping int // the number of script calls to hold back
	kept    [][]byte
}

// slowNetTo returns a client that uses slowNet. It times out on calls that are held back and
// retries once.
func slowNetTo(t *testing.T, rdb *redis.Client) (*slowNet, *redis.Client) {
	t.Helper()
	n := &slowNet{addr: rdb.Options().Addr}
	slow := redis.NewClient(&redis.Options{
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, n.addr)
			return &slowConn{Conn: conn, net: n}, err
		},
		ReadTimeout: startsWithin, MaxRetries: 1, MinRetryBackoff: -1,
	})
	t.Cleanup(func() { _ = slow.Close() })
	// What is held back must be the call itself, not a NOSCRIPT round trip.
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew} {
		require.NoError(t, script.Load(t.Context(), rdb).Err())
	}
	return n, slow
}

// slowConn times out immediately while it waits for a call that is held back.
type slowConn struct {
	net.Conn
	net  *slowNet
	slow atomic.Bool
}

// Write implements io.Writer. A call fits into one Write.
func (c *slowConn) Write(p []byte) (int, error) {
	if c.net.keep(p) {
		c.slow.Store(true)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Read implements io.Reader.
func (c *slowConn) Read(p []byte) (int, error) {
	if c.slow.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	return c.Conn.Read(p)
}

func (n *slowNet) keep(request []byte) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.keeping == 0 || !bytes.Contains(request, []byte("evalsha")) {
		return false
	}
	n.keeping--
	n.kept = append(n.kept, bytes.Clone(request))
	return true
}

// keepNext holds back the next script calls.
func (n *slowNet) keepNext(calls int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keeping, n.kept = calls, nil
}

// calls returns the calls that were held back, and fails the test unless there are as many as
// expected.
func (n *slowNet) calls(t *testing.T, want int) [][]byte {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	require.Zero(t, n.keeping, "too few calls were held back: the test shows nothing")
	require.Len(t, n.kept, want)
	return n.kept
}

// first returns the first calls that were held back, and ends holding back.
func (n *slowNet) first(t *testing.T, want int) [][]byte {
	t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	require.GreaterOrEqual(t, len(n.kept), want)
	n.keeping = 0
	return n.kept[:want]
}

// deliver sends a call to Redis and waits for the answer.
func (n *slowNet) deliver(t *testing.T, call []byte) {
	t.Helper()
	conn, err := net.Dial("tcp", n.addr)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close()) }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(startsWithin)))
	_, err = conn.Write(call)
	require.NoError(t, err)
	answer := make([]byte, 1<<10)
	read, err := conn.Read(answer)
	require.NoError(t, err)
	require.NotContains(t, string(answer[:read]), "NOSCRIPT")
}

// The first attempt of a call is held back and its second is answered. The first arrives after each
// of the steps that may follow.
func TestCallAfterItsRepeatChangesNothing(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	key, other := b.key("ann"), b.key("bob")
	n, slow := slowNetTo(t, b.rdb)
	l := newLocker(t, slow)
	late := func(want int, holder *lock.Lease) {
		t.Helper()
		n.deliver(t, n.calls(t, 1)[0])
		require.Equal(t, want, b.depth(key))
		if holder != nil {
			require.NoError(t, holder.Err())
		}
	}
	// lateAfter releases a lease and delivers the call when the lock is free, and when the next call that
	// uses the receipt holds it.
	lateAfter := func(lease *lock.Lease) {
		t.Helper()
		require.NoError(t, lease.Release(ctx))
		late(0, nil)
		next, err := l.Acquire(ctx, key, lock.For(time.Minute))
		require.NoError(t, err)
		late(1, next)
		require.NoError(t, next.Release(ctx))
		late(0, nil)
	}

	// Some of the locks were busy.
	n.keepNext(1)
	others := b.take(ctx, time.Minute, other) // the Locker of the bench is not slow
	mine, _, err := l.TryEach(ctx, []string{key, other}, lock.For(time.Minute))
	require.NoError(t, err)
	require.Equal(t, []string{key}, mine.Keys())
	late(1, mine)
	require.NoError(t, others.Release(ctx))
	late(1, mine)
	require.Zero(t, b.depth(other), "it was busy when the call was answered")
	lateAfter(mine)

	// All of the locks were busy, so nothing is released.
	others = b.take(ctx, time.Minute, key)
	n.keepNext(1)
	_, err = l.TryAcquire(ctx, key)
	require.ErrorIs(t, err, lock.ErrBusy)
	late(1, others)
	lateAfter(others)

	// The lock was busy, and a late call takes it for a waiter.
	b.take(ctx, time.Minute, key)
	n.keepNext(1)
	waiting := acquiring(t, l, key)
	b.waitListening(key, 1)
	require.NoError(t, b.rdb.Del(ctx, key).Err()) // sends no message
	late(1, nil)
	mine = await(t, waiting, startsWithin, "the waiter's lock")
	late(1, mine)
	lateAfter(mine)

	// The lock was busy, and the waiter gives up.
	others = b.take(ctx, time.Minute, key)
	n.keepNext(1)
	patient, giveUp := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := l.Acquire(patient, key)
		ended <- err
	}()
	b.waitListening(key, 1)
	giveUp()
	require.ErrorIs(t, await(t, ended, startsWithin, "the end of the wait"), context.Canceled)
	require.NoError(t, others.Release(ctx))
	n.deliver(t, n.calls(t, 1)[0])
	testkit.Eventually(t, startsWithin, "a free lock", func() bool { return b.depth(key) == 0 })
	late(0, nil)

	// The lock was free.
	n.keepNext(1)
	mine, err = l.Acquire(ctx, key, lock.For(time.Minute))
	require.NoError(t, err)
	lateAfter(mine)

	// A release.
	mine, err = l.Acquire(ctx, key, lock.For(time.Minute))
	require.NoError(t, err)
	n.keepNext(1)
	lateAfter(mine)
}

// setupLossy returns a bench whose Locker uses the proxy. The bench itself reads Redis directly.
func setupLossy(t *testing.T, opts ...lock.Option) (bench, *testkit.LossyProxy) {
	t.Helper()
	t.Parallel()
	proxy, rdb, direct := testkit.RedisThroughProxy(t)
	b := setupOn(t, direct)
	b.Locker = newLocker(t, rdb, opts...)
	// Otherwise the lost answer would be a NOSCRIPT.
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew, lua.LockForce} {
		require.NoError(t, script.Load(t.Context(), b.rdb).Err())
	}
	return b, proxy
}

func TestReleaseWithLostAnswersIsNotALoss(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.Del(ctx, b.key("bob")).Err())

	proxy.Lose(3)
	err := outer.Release(ctx)
	proxy.RequireLost(t)
	require.Equal(t, []string{b.key("bob")}, lostKeys(t, err), "only what was lost before the first attempt")
	assert.Equal(t, 1, b.depth(b.key("ann")), "the inner lease holds it")

	proxy.Lose(3)
	require.NoError(t, inner.Release(ctx))
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAcquireOfUnknownOutcomeIsReleased(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))

	proxy.Lose(4) // all attempts of go-redis
	_, _, err := b.TryEach(outer.Context(ctx), []string{b.key("ann"), b.key("bob")}, lock.For(time.Second))
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	assert.Equal(t, 1, b.depth(b.key("ann")), "the owner keeps what it held before")
	require.NoError(t, outer.Release(ctx))
}

func TestReleaseOfUnknownOutcomeMayBeRepeated(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	names := b.names(600) // two script calls
	lease := b.take(ctx, time.Minute, names...)

	proxy.Lose(4)
	err := lease.Release(ctx)
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrLost)
	proxy.RequireLost(t)
	require.ErrorIs(t, lease.Err(), lock.ErrReleased)
	assert.Zero(t, b.depth(names[599]), "released by the call that was answered")

	require.NoError(t, lease.Release(ctx))
	left, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, left)
}

// callTries is how often go-redis sends a call.
const callTries = 4

func TestLostAnswersAreNotALossForAnyAcquire(t *testing.T) {
	for name, acquire := range map[string]func(b bench, keys []string) (*lock.Lease, error){
		"Acquire": func(b bench, keys []string) (*lock.Lease, error) {
			return b.Acquire(b.t.Context(), keys[0])
		},
		"TryAcquire": func(b bench, keys []string) (*lock.Lease, error) {
			return b.TryAcquire(b.t.Context(), keys[0])
		},
		"AcquireAll": func(b bench, keys []string) (*lock.Lease, error) {
			return b.AcquireAll(b.t.Context(), keys)
		},
		"TryEach": func(b bench, keys []string) (*lock.Lease, error) {
			lease, _, err := b.TryEach(b.t.Context(), keys)
			return lease, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, proxy := setupLossy(t)
			ctx := t.Context()
			keys := b.names(3)
			proxy.Lose(callTries - 1)
			lease, err := acquire(b, keys)
			require.NoError(t, err)
			proxy.RequireLost(t)
			for _, key := range lease.Keys() {
				assert.Equal(t, 1, b.depth(key))
			}
			_, err = b.TryAcquire(ctx, keys[0])
			require.ErrorIs(t, err, lock.ErrBusy)
			require.NoError(t, lease.Err())
			require.NoError(t, lease.Release(ctx))
			assert.Zero(t, b.depth(keys[0]))

			proxy.Lose(callTries)
			lease, err = acquire(b, keys)
			proxy.RequireLost(t)
			if strings.HasPrefix(name, "Try") {
				require.Error(t, err)
				require.NotErrorIs(t, err, lock.ErrLost, "it never had the lock")
				assert.Nil(t, lease)
			} else { // it retries the same call
				require.NoError(t, err)
				assert.Equal(t, 1, b.depth(keys[0]))
				require.NoError(t, lease.Release(ctx))
			}
			left, err := b.rdb.Exists(ctx, keys...).Result()
			require.NoError(t, err)
			assert.Zero(t, left, "what may have been taken is released")
		})
	}
}

func TestBusyAnswerMayBeLost(t *testing.T) {
	var o observed
	b, proxy := setupLossy(t, o.option(t))
	ctx := t.Context()
	held, err := newLocker(t, b.rdb).Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	proxy.Lose(callTries - 1)
	_, err = b.TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, lock.ErrBusy)
	proxy.RequireLost(t)
	proxy.Lose(callTries - 1)
	ctx, cancel := context.WithCancel(ctx)
	given := make(chan error, 1)
	go func() {
		_, err := b.AcquireAll(ctx, []string{b.key("bob"), b.key("ann")})
		given <- err
	}()
	testkit.Eventually(t, startsWithin, "an answer comes", func() bool { return o.snapshot().Busy > 1 })
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	cancel()
	require.ErrorIs(t, await(t, given, startsWithin, "the end of the wait"), context.Canceled)
	require.NoError(t, held.Err())
	require.NoError(t, held.Release(t.Context()), "the holder keeps its lock")
	assert.Zero(t, b.depth(b.key("bob")))
}

// Only the release can wake the waiter.
func TestWaiterWithLostAnswersTakesTheLockOnce(t *testing.T) {
	for name, lost := range map[string]int32{"all but the last": callTries - 1, "all": callTries} {
		t.Run(name, func(t *testing.T) {
			var o observed
			b, proxy := setupLossy(t, lock.WithPoll(never), o.option(t))
			ctx, key := t.Context(), b.key("ann")
			direct := newLocker(t, b.rdb, lock.WithPoll(never))
			held, err := direct.Acquire(ctx, key, lock.For(lock.MaxLease))
			require.NoError(t, err)
			waiting := acquiring(t, b.Locker, key)
			b.waitListening(key, 1)
			testkit.Eventually(t, startsWithin, "an attempt after the subscription", func() bool {
				return o.snapshot().Busy == 2
			})

			proxy.Lose(lost)
			require.NoError(t, held.Release(ctx))
			got := await(t, waiting, startsWithin, "the lock")
			proxy.RequireLost(t)
			assert.Equal(t, 1, b.depth(key), "taken once by several attempts")
			require.NoError(t, got.Release(ctx))
			next, err := direct.TryAcquire(ctx, key)
			require.NoError(t, err, "the lock is free")
			require.NoError(t, next.Release(ctx))
			assert.Zero(t, o.snapshot().Lost)
		})
	}
}

func TestRenewalWithLostAnswersIsRetriedInTime(t *testing.T) {
	const length = 5 * time.Second
	var o observed
	b, proxy := setupLossy(t, lock.WithLease(length), o.option(t))
	ctx := t.Context()
	ann, bob := b.key("ann"), b.key("bob")
	lease, err := b.AcquireAll(ctx, []string{ann, bob})
	require.NoError(t, err)
	held, granted := lease.Context(ctx), b.expiry(ann)
	proxy.Lose(callTries)
	testkit.Eventually(t, startsWithin, "a failed renewal", func() bool { return o.snapshot().Failed > 0 })
	proxy.Lose(0) // on a busy machine the call fails before its last attempt
	testkit.Eventually(t, startsWithin, "a successful renewal", func() bool { return o.snapshot().Renewed > 0 })
	require.NoError(t, lease.Err())
	testkit.Eventually(t, startsWithin, "the end of the first lease", func() bool { return b.now().After(granted) })
	require.NoError(t, lease.Err())
	require.NoError(t, held.Err())
	assert.Equal(t, 2, o.snapshot().Failed, "one call for two locks")
	assert.Zero(t, o.snapshot().Lost)
	require.NoError(t, lease.Release(ctx))
	assert.Zero(t, b.depth(ann))
}

// It takes the lock from its holder only.
func TestForceReleaseWithLostAnswersReleasesTheLock(t *testing.T) {
	b, proxy := setupLossy(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	proxy.Lose(callTries - 1)
	_, err := b.ForceRelease(ctx, b.key("ann"))
	require.NoError(t, err)
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("ann")))

	proxy.Lose(callTries)
	_, err = b.ForceRelease(ctx, b.key("bob"))
	require.Error(t, err, "the outcome is unknown")
	proxy.RequireLost(t)
	assert.Zero(t, b.depth(b.key("bob")))
	require.Equal(t, []string{b.key("ann"), b.key("bob")}, lostKeys(t, lease.Release(ctx)))
}
