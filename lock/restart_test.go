package lock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

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
