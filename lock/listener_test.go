package lock_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// Redisson gives both the same channel.
func TestKeyWithAndWithoutBracesAreTwoLocks(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, bare := t.Context(), b.bare("ann")
	braced := "{" + bare + "}"
	other := newLocker(t, b.rdb)
	hold := func(key string) *lock.Lease {
		t.Helper()
		lease, err := other.TryAcquire(ctx, key, lock.For(never))
		require.NoError(t, err)
		return lease
	}
	holdsBare, holdsBraced := hold(bare), hold(braced)
	getsBare := acquiring(t, b.Locker, bare)
	b.waitQueued(bare, 1)
	getsBraced := acquiring(t, b.Locker, braced)
	b.waitQueued(braced, 1)

	require.NoError(t, holdsBraced.Release(ctx))
	second := await(t, getsBraced, startsWithin, "the key in braces")
	assert.Equal(t, 1, b.Waiting(bare), "the bare key is still held")
	b.waitListening(bare, 1)
	require.NoError(t, holdsBare.Release(ctx))
	require.NoError(t, await(t, getsBare, startsWithin, "the bare key").Release(ctx))
	require.NoError(t, second.Release(ctx))

	// Again, while one of them has a waiter and the channel is subscribed to.
	holdsBare, holdsBraced = hold(bare), hold(braced)
	getsBraced = acquiring(t, b.Locker, braced)
	b.waitQueued(braced, 1)
	for range 2 {
		getsBare = acquiring(t, b.Locker, bare)
		b.waitQueued(bare, 1)
		require.NoError(t, holdsBare.Release(ctx))
		require.NoError(t, await(t, getsBare, startsWithin, "the bare key").Release(ctx))
		holdsBare = hold(bare)
	}
	require.NoError(t, holdsBare.Release(ctx))
	require.NoError(t, holdsBraced.Release(ctx))
	require.NoError(t, await(t, getsBraced, startsWithin, "the key in braces").Release(ctx))
}

// A waiter that goes on to a key of the same channel ends one subscription and begins the other in one step.
func TestWaiterFollowsFromBareKeyToKeyInBraces(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, bare := t.Context(), b.bare("ann")
	braced := "{" + bare + "}"
	other := newLocker(t, b.rdb)
	holdsBare, err := other.TryAcquire(ctx, bare, lock.For(never))
	require.NoError(t, err)
	holdsBraced, err := other.TryAcquire(ctx, braced, lock.For(never))
	require.NoError(t, err)
	gets := acquiringIn(ctx, t, b.Locker, []string{bare, braced})
	b.waitQueued(bare, 1)
	require.NoError(t, holdsBare.Release(ctx))
	b.waitQueued(braced, 1)
	require.NoError(t, holdsBraced.Release(ctx))
	require.NoError(t, await(t, gets, startsWithin, "both keys").Release(ctx))
}

// If its connection breaks while the client sends a subscription, the client connects again without it.
func TestListenerRepeatsFailedSubscription(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, options := t.Context(), *b.rdb.Options()
	var breaks atomic.Bool
	options.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return &breakingConn{conn, &breaks}, err
	}
	waits := redis.NewClient(&options)
	t.Cleanup(func() { _ = waits.Close() })
	holder, err := newLocker(t, b.rdb).AcquireAll(ctx, []string{b.key("ann"), b.key("bob")}, lock.For(never))
	require.NoError(t, err)
	b.Locker = newLocker(t, waits, lock.WithPoll(never))
	getsAnn := acquiring(t, b.Locker, b.key("ann"))
	b.waitQueued(b.key("ann"), 1)
	breaks.Store(true)
	getsBob := acquiring(t, b.Locker, b.key("bob"))
	b.waitQueued(b.key("bob"), 1)
	b.waitQueued(b.key("ann"), 1)
	require.False(t, breaks.Load(), "a subscription has failed")
	require.NoError(t, holder.Release(ctx))
	require.NoError(t, await(t, getsAnn, startsWithin, "the first lock").Release(ctx))
	require.NoError(t, await(t, getsBob, startsWithin, "the second lock").Release(ctx))
}

// breakingConn breaks when it has to send the next subscription.
type breakingConn struct {
	net.Conn
	breaks *atomic.Bool
}

// Write implements io.Writer.
func (c *breakingConn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("\r\nsubscribe\r\n")) && c.breaks.CompareAndSwap(true, false) {
		return 0, syscall.EPIPE
	}
	return c.Conn.Write(p)
}

func TestListenerConnectionLivesWhileACallWaits(t *testing.T) {
	b, holder := setupWaiting(t, "ann", "bob")
	ctx, key := t.Context(), b.key("ann")
	const idle = 100 * time.Millisecond
	options, err := redis.ParseURL(testkit.RedisURL(t))
	require.NoError(t, err)
	options.ClientName = "waits-" + rand.Text()
	named := redis.NewClient(options)
	t.Cleanup(func() { _ = named.Close() })
	c := countCalls(t, named)
	b.Locker = newLocker(t, named, lock.WithPoll(idle/2), lock.WithListenIdle(idle))
	// Redis counts a connection as pubsub only while it has subscriptions, but it reports the last
	// command.
	subscribes := regexp.MustCompile(" name=" + options.ClientName + " .* cmd=(subscribe|unsubscribe|ping) ")
	connections := func() int {
		list, err := b.rdb.ClientList(ctx).Result()
		require.NoError(t, err)
		return len(subscribes.FindAllString(list, -1))
	}

	got := []<-chan *lock.Lease{
		acquiring(t, b.Locker, key), acquiring(t, b.Locker, key), acquiring(t, b.Locker, b.key("bob")),
	}
	b.waitQueued(key, 2)
	b.waitQueued(b.key("bob"), 1)
	asked := c.calls(acquireCalls)
	testkit.Eventually(t, startsWithin, "polls for longer than the idle time", func() bool {
		return c.calls(acquireCalls) > asked+8
	})
	assert.Equal(t, 1, connections(), "one connection for all waiters and keys, while they wait")

	require.NoError(t, holder.Release(ctx))
	for range got {
		require.NoError(t, b.first(got).Release(ctx))
	}
	testkit.Eventually(t, startsWithin, "the end of the connection", func() bool { return connections() == 0 })

	again, err := newLocker(t, b.rdb).Acquire(ctx, key)
	require.NoError(t, err)
	next := acquiring(t, b.Locker, key)
	b.waitQueued(key, 1)
	assert.Equal(t, 1, connections(), "a new connection for the next waiter")
	require.NoError(t, again.Release(ctx))
	require.NoError(t, await(t, next, startsWithin, "the lock").Release(ctx))
}

func TestThousandKeysShareOneListener(t *testing.T) {
	_, b := forgetfulServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	options := *b.rdb.Options()
	options.PoolSize, options.PoolTimeout, options.ReadTimeout = 32, never, never
	b.rdb = redis.NewClient(&options)
	t.Cleanup(func() { _ = b.rdb.Close() })
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(never))
	names := b.names(1000)
	holder, busy, err := newLocker(t, b.rdb).TryEach(ctx, names, lock.For(never))
	require.NoError(t, err)
	require.Empty(t, busy)
	c := countCalls(t, b.rdb)
	var all sync.WaitGroup
	for _, name := range names {
		all.Go(func() {
			lease, err := b.Acquire(ctx, name)
			if assert.NoError(t, err) {
				for err = lease.Release(ctx); errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil; {
					err = lease.Release(ctx) // a thousand concurrent releases may take longer than one
				}
				assert.NoError(t, err)
			}
		})
	}
	// Each has asked once, and again after its subscription.
	testkit.Eventually(t, time.Minute, "all waiters", func() bool { return c.calls(acquireCalls) == 2*len(names) })
	require.NoError(t, holder.Release(ctx))
	all.Wait()
	assert.Equal(t, 3*len(names), c.calls(acquireCalls))
}

// The lock is released after it was found busy and before the waiter listens. A new subscription
// makes a waiter check again, but here the channel is already subscribed to for the other key.
func TestReleaseBetweenAttemptAndWaitIsNotMissed(t *testing.T) {
	b := setup(t)
	ctx, bare := t.Context(), b.bare("ann")
	braced := "{" + bare + "}"
	holder := newLocker(t, b.rdb)
	holdsBare, err := holder.TryAcquire(ctx, bare, lock.For(never))
	require.NoError(t, err)
	holdsBraced, err := holder.TryAcquire(ctx, braced, lock.For(never))
	require.NoError(t, err)

	var looks atomic.Int64
	busy, goOn := make(chan struct{}, 1), make(chan struct{})
	unblock := sync.OnceFunc(func() { close(goOn) })
	defer unblock()
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(never), lock.WithObserver(lock.Observer{Busy: func(int) {
		if looks.Add(1) == 3 {
			busy <- struct{}{}
			<-goOn
		}
	}}))
	c := countCalls(t, b.rdb)
	getsBraced := acquiring(t, b.Locker, braced)
	b.waitQueued(braced, 1)
	testkit.Eventually(t, startsWithin, "one attempt before the subscription and one after it", func() bool {
		return looks.Load() == 2
	})
	getsBare := acquiring(t, b.Locker, bare)
	await(t, busy, startsWithin, "a busy answer")
	require.NoError(t, holdsBare.Release(ctx))
	b.waitCalls(c, 4) // its message has woken the waiter for the other key
	unblock()
	require.NoError(t, await(t, getsBare, startsWithin, "the bare key").Release(ctx))
	require.NoError(t, holdsBraced.Release(ctx))
	require.NoError(t, await(t, getsBraced, startsWithin, "the key in braces").Release(ctx))
}

// Redis refuses the subscription, as it does while a cluster does not know the node of a slot. The
// client does not report that.
func TestRefusedSubscriptionIsRepeated(t *testing.T) {
	_, b := ownServer(t)
	ctx, key := t.Context(), b.key("ann")
	waiter := newLocker(t, b.rdb, lock.WithPoll(never))
	held := b.take(ctx, never, key)
	require.NoError(t, b.rdb.Do(ctx, "ACL", "SETUSER", "default", "resetchannels").Err())
	waiting := acquiring(t, waiter, key)
	testkit.Eventually(t, startsWithin, "a refusal", func() bool {
		return strings.Contains(b.rdb.Info(ctx, "errorstats").Val(), "errorstat_NOPERM")
	})
	require.NoError(t, b.rdb.Do(ctx, "ACL", "SETUSER", "default", "allchannels").Err())
	b.waitListening(key, 1)
	require.NoError(t, held.Release(ctx))
	require.NoError(t, await(t, waiting, startsWithin, "the lock").Release(ctx))
}

// outageCounter counts the attempts that an Observer reports while Redis is unavailable.
type outageCounter struct{ tries atomic.Int64 }

func (o *outageCounter) option() lock.Option {
	return lock.WithObserver(lock.Observer{Unreachable: func(int, error) { o.tries.Add(1) }})
}

func (o *outageCounter) wait(t *testing.T, tries int64) {
	t.Helper()
	testkit.Eventually(t, startsWithin, fmt.Sprintf("%d failed attempts", tries), func() bool {
		return o.tries.Load() >= tries
	})
}

type replied string

func (e replied) Error() string { return string(e) }

func (replied) RedisError() {}

// TestUnavailableErrors lists the errors that are retried.
func TestWaiterRetriesOutagesOnly(t *testing.T) {
	b := setup(t)
	var o outageCounter
	b.Locker = newLocker(t, b.rdb, o.option())
	c := countCalls(t, b.rdb)
	fail := func(reply string) {
		c.answer(func(_ int, _ redis.ProcessHook, _ context.Context, cmd redis.Cmder) error {
			cmd.SetErr(replied(reply))
			return replied(reply)
		})
	}
	fail("LOADING Redis is loading the dataset in memory")
	waiting := acquiring(t, b.Locker, b.key("ann"))
	o.wait(t, 2)
	_, err := b.TryAcquire(t.Context(), b.key("bob"))
	require.ErrorContains(t, err, "LOADING", "TryAcquire does not wait")
	c.answer(nil)
	require.NoError(t, await(t, waiting, startsWithin, "the lock").Release(t.Context()))

	fail("NOPERM this user has no permissions to run the 'evalsha' command")
	_, err = b.Acquire(t.Context(), b.key("ann"))
	require.ErrorContains(t, err, "NOPERM")
	c.answer(nil)
	gone := redis.NewClient(b.rdb.Options())
	require.NoError(t, gone.Close())
	_, err = newLocker(t, gone).Acquire(t.Context(), "ann")
	require.ErrorIs(t, err, redis.ErrClosed)
}

func TestWaitThatExceedsItsDeadlineIsBusy(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	key := b.key("ann")
	ours := errors.New("ours")
	acquire := func(ctx context.Context) error {
		_, err := b.Acquire(ctx, key)
		return err
	}
	t.Run("by a deadline", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		err := acquire(ctx)
		require.ErrorIs(t, err, lock.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.EqualError(t, err, "lock busy: wait for lock "+key+": context deadline exceeded")
		require.ErrorIs(t, b.Do(ctx, key, func(context.Context) error { return nil }), lock.ErrBusy)
		_, err = b.AcquireAll(ctx, []string{key, b.key("bob")})
		require.ErrorIs(t, err, lock.ErrBusy)
	})
	t.Run("by a deadline with a cause", func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Millisecond, ours)
		defer cancel()
		err := acquire(ctx)
		require.ErrorIs(t, err, lock.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, ours)
	})
	t.Run("a cancelled wait is not busy", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		got := make(chan error, 1)
		go func() { got <- acquire(ctx) }()
		b.waitQueued(key, 1)
		cancel(ours)
		err := await(t, got, startsWithin, "the error")
		require.ErrorIs(t, err, ours)
		require.NotErrorIs(t, err, lock.ErrBusy)
	})
	t.Run("and reports an unavailable Redis", func(t *testing.T) {
		server, own := ownServer(t)
		server.Kill()
		var o outageCounter
		l := newLocker(t, own.rdb, o.option())
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := l.Acquire(ctx, "ann")
		require.ErrorIs(t, err, lock.ErrBusy)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		var refused *net.OpError
		require.ErrorAs(t, err, &refused)

		cancelled, giveUp := context.WithCancel(t.Context())
		tried := o.tries.Load()
		got := make(chan error, 1)
		var ended sync.WaitGroup
		ended.Go(func() {
			_, err := l.Acquire(cancelled, "ann")
			got <- err
		})
		o.wait(t, tried+2)
		giveUp()
		err = await(t, got, startsWithin, "the error")
		ended.Wait()
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
		require.NotErrorIs(t, err, lock.ErrBusy)
	})
	require.NoError(t, holder.Release(t.Context()))
}
