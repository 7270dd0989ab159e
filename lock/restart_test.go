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

// failingScripts answers each script with an error while one is set. It replaces a Redis in a state
// that is slow to create.
type failingScripts struct{ err atomic.Pointer[error] }

func (a *failingScripts) in(b bench) {
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if err := a.err.Load(); err != nil && cmd.Name() == "evalsha" {
			cmd.SetErr(*err)
			return *err
		}
		return next(ctx, cmd)
	}))
}

type replied string

func (e replied) Error() string { return string(e) }

func (replied) RedisError() {}

func TestWaiterRetriesOutagesOnly(t *testing.T) {
	for _, reply := range []string{
		"LOADING Redis is loading the dataset in memory", "READONLY You can't write against a read only replica.",
		"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "CLUSTERDOWN The cluster is down",
		"ERR max number of clients reached", "NOREPLICAS Not enough good replicas to write.",
		"BUSY Redis is busy running a script.",
	} {
		t.Run(reply, func(t *testing.T) {
			b := setup(t)
			var o outageCounter
			b.Locker = newLocker(t, b.rdb, o.option())
			var a failingScripts
			failure := error(replied(reply))
			a.in(b)
			a.err.Store(&failure)
			waiting := acquiring(t, b.Locker, b.key("ann"))
			o.wait(t, 2)
			_, err := b.TryAcquire(t.Context(), b.key("bob"))
			require.ErrorContains(t, err, reply)
			a.err.Store(nil)
			require.NoError(t, await(t, waiting, startsWithin, "the lock").Release(t.Context()))
		})
	}
	for _, reply := range []string{
		"NOPERM this user has no permissions to run the 'evalsha' command",
		"NOAUTH Authentication required.", "ERR unknown",
	} {
		t.Run(reply, func(t *testing.T) {
			b := setup(t)
			var a failingScripts
			failure := error(replied(reply))
			a.in(b)
			a.err.Store(&failure)
			_, err := b.Acquire(t.Context(), b.key("ann"))
			require.ErrorContains(t, err, reply)
			a.err.Store(nil)
		})
	}
	t.Run("a key of another type", func(t *testing.T) {
		b := setup(t)
		require.NoError(t, b.rdb.Set(t.Context(), b.key("ann"), "text", 0).Err())
		_, err := b.Acquire(t.Context(), b.key("ann"))
		require.ErrorContains(t, err, "WRONGTYPE")
	})
	t.Run("a wrong password", func(t *testing.T) {
		_, b := ownServer(t)
		require.NoError(t, b.rdb.ConfigSet(t.Context(), "requirepass", "right").Err())
		wrong := redis.NewClient(&redis.Options{Addr: b.rdb.Options().Addr, Password: "wrong"})
		t.Cleanup(func() { _ = wrong.Close() })
		_, err := newLocker(t, wrong).Acquire(t.Context(), "ann")
		require.ErrorContains(t, err, "WRONGPASS")
		require.NoError(t, b.rdb.Do(t.Context(), "auth", "right").Err())
	})
	t.Run("a client that is closed", func(t *testing.T) {
		b := setup(t)
		gone := redis.NewClient(b.rdb.Options())
		require.NoError(t, gone.Close())
		_, err := newLocker(t, gone).Acquire(t.Context(), "ann")
		require.ErrorIs(t, err, redis.ErrClosed)
	})
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
