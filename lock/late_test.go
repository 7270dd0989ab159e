package lock_test

import (
	"bytes"
	"context"
	"net"
	"os"
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
