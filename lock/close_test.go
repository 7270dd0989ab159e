package lock_test

import (
	"context"
	"errors"
	"maps"
	"slices"
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

func TestCloseReleasesLeasesAndEndsWaits(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	l := lock.New(b.rdb, lock.WithPoll(never))
	watched, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	explicit, err := l.AcquireAll(ctx, []string{b.key("bob"), b.key("cid")}, lock.For(time.Minute))
	require.NoError(t, err)
	deeper, err := l.Acquire(watched.Context(ctx), b.key("ann"))
	require.NoError(t, err)
	leases := []*lock.Lease{watched, explicit, deeper}
	inside := make([]context.Context, len(leases))
	for i, lease := range leases {
		inside[i] = lease.Context(ctx)
	}
	others := b.take(ctx, time.Minute, b.key("dan"))
	var waiting sync.WaitGroup
	for _, key := range []string{"ann", "ann", "dan"} { // held by the same Locker and by another one
		waiting.Go(func() {
			_, err := l.Acquire(ctx, b.key(key))
			assert.ErrorIs(t, err, lock.ErrClosed)
		})
	}
	waiting.Go(func() {
		_, err := l.AcquireAll(ctx, []string{b.key("eve"), b.key("cid")})
		assert.ErrorIs(t, err, lock.ErrClosed)
	})
	b.waitListening(b.key("ann"), 1)
	b.waitListening(b.key("cid"), 1)
	b.waitListening(b.key("dan"), 1)

	require.NoError(t, l.Close(ctx))
	gone := make(chan struct{}, 1)
	go func() {
		waiting.Wait()
		gone <- struct{}{}
	}()
	await(t, gone, startsWithin, "waiters return before a lease ends")
	for i, lease := range leases {
		require.ErrorIs(t, lease.Err(), lock.ErrClosed)
		require.ErrorIs(t, context.Cause(inside[i]), lock.ErrClosed)
		assert.False(t, lease.Holds(lease.Keys()[0]))
	}
	for _, key := range []string{"ann", "bob", "cid", "eve"} {
		assert.Zero(t, b.depth(b.key(key)), key)
	}
	assert.Equal(t, 1, b.depth(b.key("dan")), "held by another Locker")
	require.NoError(t, others.Err())

	for name, call := range lockCalls(ctx, l, []string{b.key("ann")}) {
		require.ErrorIs(t, call(), lock.ErrClosed, name)
	}
	_, err = l.Acquire(watched.Context(ctx), b.key("ann"))
	require.ErrorIs(t, err, lock.ErrClosed)
	assert.Zero(t, b.depth(b.key("ann")))
	require.ErrorIs(t, context.Cause(watched.Context(ctx)), lock.ErrClosed, "a context that is created after the end")
	require.NoError(t, watched.Release(ctx), "it is already released")
	require.ErrorIs(t, watched.Err(), lock.ErrClosed)
	require.NoError(t, l.Close(ctx), "a second Close")
}

// lockCalls are all calls that may take locks.
func lockCalls(ctx context.Context, l *lock.Locker, keys []string, opts ...lock.AcquireOption) map[string]func() error {
	return map[string]func() error{
		"Acquire":    func() error { _, err := l.Acquire(ctx, keys[0], opts...); return err },
		"TryAcquire": func() error { _, err := l.TryAcquire(ctx, keys[0], opts...); return err },
		"AcquireAll": func() error { _, err := l.AcquireAll(ctx, keys, opts...); return err },
		"TryEach":    func() error { _, _, err := l.TryEach(ctx, keys, opts...); return err },
		"Do": func() error {
			return l.Do(ctx, keys[0], func(context.Context) error {
				return errors.New("f was called")
			}, opts...)
		},
	}
}

func TestCloseReportsLostLocksAndReleasesTheRest(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	l := lock.New(b.rdb)
	lost, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	_, err = l.Acquire(ctx, b.key("bob"))
	require.NoError(t, err)
	require.NoError(t, b.rdb.Del(ctx, b.key("ann")).Err())
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, l.Close(ctx)))
	assert.Zero(t, b.depth(b.key("bob")))
	require.ErrorIs(t, lost.Err(), lock.ErrClosed, "Close ended it before the loss was found")
	require.NoError(t, lost.Release(ctx), "a loss is reported once")
}

// Goroutines make all kinds of calls while the Locker is closed. No lease here ends by itself.
func TestCloseDuringOtherCallsLeavesNoLock(t *testing.T) {
	b := setup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	const rounds, callers, closers = 6, 24, 3
	names := b.names(6)
	for round := range rounds {
		l := lock.New(b.rdb, lock.WithLease(lock.MaxLease))
		var done atomic.Int64
		closing := make(chan struct{})
		var all sync.WaitGroup
		for caller := range callers {
			all.Go(func() {
				for i := caller; ; i++ {
					err := useLocks(ctx, l, names[i%len(names)], names[(i+1)%len(names)], i)
					if err != nil {
						assert.ErrorIs(t, err, lock.ErrClosed)
						return
					}
					if done.Add(1) == int64(30*(round+1)) {
						close(closing)
					}
				}
			})
		}
		for range closers {
			all.Go(func() {
				<-closing
				assert.NoError(t, l.Close(ctx))
			})
		}
		all.Wait()
		left, err := b.rdb.Exists(ctx, names...).Result()
		require.NoError(t, err)
		require.Zero(t, left, "round %d", round)
	}
}

// useLocks takes locks in one of several ways and reenters them. It ignores errors that are
// expected.
func useLocks(ctx context.Context, l *lock.Locker, one, other string, what int) error {
	var lease *lock.Lease
	var err error
	switch what % 5 {
	case 0:
		lease, err = l.Acquire(ctx, one)
	case 1:
		lease, err = l.TryAcquire(ctx, one, lock.For(lock.MaxLease))
	case 2:
		lease, err = l.AcquireAll(ctx, []string{other, one})
	case 3:
		lease, _, err = l.TryEach(ctx, []string{one, other})
	default:
		err = l.Do(ctx, one, func(ctx context.Context) error {
			deeper, err := l.TryAcquire(ctx, one)
			if err == nil {
				err = deeper.Release(ctx)
			}
			if errors.Is(err, context.Canceled) {
				return context.Cause(ctx)
			}
			return err
		})
	}
	if errors.Is(err, lock.ErrBusy) {
		return nil
	}
	if err != nil || lease == nil {
		return err
	}
	inside := lease.Context(ctx)
	deeper, _, err := l.TryEach(inside, []string{one, other})
	if err == nil {
		err = deeper.Release(ctx)
	}
	if errors.Is(err, context.Canceled) {
		err = context.Cause(inside)
	}
	return errors.Join(err, lease.Release(ctx))
}

// The first Close waits for a call in progress.
func TestSecondCloseReleasesWhileTheFirstWaits(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	c := countCalls(t, b.rdb)
	l := lock.New(b.rdb)
	granted, goOn := make(chan struct{}, 1), make(chan struct{})
	held, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	away := errors.New("Redis is away")
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			return away
		}
		err := next(ctx, cmd)
		granted <- struct{}{}
		<-goOn
		return err
	})
	answer, first := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := l.TryAcquire(ctx, b.key("bob"))
		answer <- err
	}()
	await(t, granted, startsWithin, "a call in progress")
	go func() { first <- l.Close(ctx) }()
	testkit.Eventually(t, startsWithin, "the release fails", func() bool { return c.calls(releaseCalls) == 1 })
	require.ErrorIs(t, held.Err(), lock.ErrClosed)
	c.answer(nil)
	second := make(chan error, 1)
	go func() { second <- l.Close(ctx) }()
	testkit.Eventually(t, startsWithin, "the second release", func() bool { return b.depth(b.key("ann")) == 0 })
	close(goOn)
	require.ErrorIs(t, await(t, answer, startsWithin, "the call"), lock.ErrClosed)
	require.ErrorIs(t, await(t, first, startsWithin, "the first Close"), away)
	require.NoError(t, await(t, second, startsWithin, "the second Close"))
}

func TestCloseWaitsForAnEarlierClose(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	l := lock.New(b.rdb)
	_, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	c := countCalls(t, b.rdb)
	asked, goOn := make(chan struct{}, 1), make(chan struct{})
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			asked <- struct{}{}
			<-goOn
		}
		return next(ctx, cmd)
	})
	first, third := make(chan error, 1), make(chan error, 1)
	go func() { first <- l.Close(ctx) }()
	await(t, asked, startsWithin, "the release")
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, l.Close(short), context.DeadlineExceeded, "the first Close is still releasing")
	go func() { third <- l.Close(ctx) }()
	close(goOn)
	require.NoError(t, await(t, third, startsWithin, "another Close"))
	assert.Zero(t, b.depth(b.key("ann")))
	require.NoError(t, await(t, first, startsWithin, "the first Close"))
}

// Close does not know of the lock yet.
func TestCloseReleasesLocksGrantedMeanwhile(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	c := countCalls(t, b.rdb)
	names := b.names(5)
	for i := range len(lockCalls(ctx, nil, names)) {
		l := lock.New(b.rdb)
		granted, goOn := make(chan struct{}, 1), make(chan struct{})
		c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
			err := next(ctx, cmd)
			if kind == acquireCalls {
				granted <- struct{}{}
				<-goOn
			}
			return err
		})
		calls := lockCalls(ctx, l, names)
		call := slices.Sorted(maps.Keys(calls))[i]
		answer := make(chan error, 1)
		go func() { answer <- calls[call]() }()
		await(t, granted, startsWithin, "Redis grants the lock")
		require.Equal(t, 1, b.depth(names[0]))
		closed := make(chan error, 1)
		go func() { closed <- l.Close(ctx) }()
		testkit.Eventually(t, startsWithin, "the Locker is closed", func() bool {
			return errors.Is(context.Cause(l.Running()), context.Canceled)
		})
		close(goOn)
		require.ErrorIs(t, await(t, answer, startsWithin, call), lock.ErrClosed, call)
		require.NoError(t, await(t, closed, startsWithin, "Close waits for calls in progress"), call)
		assert.Zero(t, b.depth(names[0]), call)
	}
}

func TestCloseOfAnUnusedLockerSucceeds(t *testing.T) {
	b := setup(t)
	l := lock.New(b.rdb)
	require.NoError(t, l.Close(t.Context()))
	_, err := l.TryAcquire(t.Context(), b.key("ann"))
	require.ErrorIs(t, err, lock.ErrClosed)
}

// abandonCalls takes locks whose callers get an error, and lets their releases fail until another
// answer is set.
func abandonCalls(b bench, c *callCounter, l *lock.Locker, names ...string) {
	b.t.Helper()
	refused := replied("LOADING Redis is loading the dataset in memory")
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind != releaseCalls {
			if err := next(ctx, cmd); err != nil || kind != acquireCalls {
				return err
			}
		}
		cmd.SetErr(refused)
		return refused
	})
	for _, name := range names {
		_, err := l.TryAcquire(b.t.Context(), name, lock.For(lock.MaxLease))
		require.ErrorIs(b.t, err, refused)
	}
}

func TestAbandonedCallsAreTriedFewAtATime(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := lock.New(b.rdb)
	const parallel = 8
	names := b.names(100)
	abandonCalls(b, c, l, names...)
	var now, most atomic.Int64
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			n := now.Add(1)
			defer now.Add(-1)
			for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
			}
		}
		return next(ctx, cmd)
	})
	testkit.Eventually(t, startsWithin, "the release of all", func() bool {
		return b.rdb.Exists(t.Context(), names...).Val() == 0
	})
	assert.LessOrEqual(t, most.Load(), int64(parallel))
	require.NoError(t, l.Close(t.Context()))
}

func TestAbandonedCallsHaveOneBackoff(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb)
	const calls, parallel = 60, 8
	names := b.names(calls)
	abandonCalls(b, c, l, names...)
	tried := c.calls(releaseCalls)
	// Rounds begin 20, 40, 80 ... ms after the last one, so there are about six in a second.
	began := time.Now()
	testkit.Eventually(t, startsWithin, "a second", func() bool { return time.Since(began) > time.Second })
	assert.LessOrEqual(t, c.calls(releaseCalls)-tried, 10*parallel)
	c.answer(nil)
	testkit.Eventually(t, startsWithin, "the release of all", func() bool {
		return b.rdb.Exists(t.Context(), names...).Val() == 0
	})
}

// A Redis that hangs is asked no more after Close has returned.
func TestCloseBoundsTheLastTriesOfAbandonedCalls(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := lock.New(b.rdb)
	abandonCalls(b, c, l, b.names(40)...)
	var late atomic.Int64
	closed := make(chan struct{})
	c.answer(func(_ int, _ redis.ProcessHook, ctx context.Context, _ redis.Cmder) error {
		select {
		case <-closed:
			late.Add(1)
		default:
		}
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, l.Close(ctx), context.DeadlineExceeded)
	close(closed)
	began := time.Now()
	testkit.Eventually(t, startsWithin, "two tries", func() bool { return time.Since(began) > 2*time.Second })
	assert.Zero(t, late.Load())
	c.answer(nil)
	require.NoError(t, l.Close(t.Context()), "one more try of each")
	assert.Zero(t, b.rdb.Exists(t.Context(), b.names(40)...).Val())
}

// There are more calls than the queue can hold.
func TestNewestAbandonedCallIsReleased(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb)
	const queued = 16_384
	refused := replied("LOADING Redis is loading the dataset in memory")
	c.answer(func(_ int, _ redis.ProcessHook, _ context.Context, cmd redis.Cmder) error {
		cmd.SetErr(refused)
		return refused
	})
	for range queued + 100 {
		_, err := l.TryAcquire(t.Context(), b.key("ann"))
		require.ErrorIs(t, err, refused)
	}
	abandonCalls(b, c, l, b.key("bob"))
	require.Equal(t, 1, b.depth(b.key("bob")))
	c.answer(nil)
	testkit.Eventually(t, startsWithin, "the release", func() bool { return b.depth(b.key("bob")) == 0 })
}

// Locks that may vanish exclude as others do, are renewed and released, and reach no disk. A key that ends there has a
// DEL in the file, which changes nothing when it is read.
func TestMayVanishWritesNothingToDisk(t *testing.T) {
	server, b := ownServer(t)
	ctx, names := t.Context(), b.names(100)
	use := func(l *lock.Locker) int64 {
		t.Helper()
		before := testkit.Logged(t, b.rdb)
		lease, _, err := l.TryEach(ctx, names)
		require.NoError(t, err)
		_, busy, err := l.TryEach(ctx, names)
		require.NoError(t, err)
		require.Equal(t, names, busy)
		left := b.rdb.PTTL(ctx, names[0]).Val()
		testkit.Eventually(t, 30*time.Second, "the lease is renewed", func() bool {
			before := left
			left = b.rdb.PTTL(ctx, names[0]).Val()
			return left > before
		})
		require.NoError(t, lease.Release(ctx))
		require.Zero(t, b.rdb.Exists(ctx, names...).Val())
		return testkit.Logged(t, b.rdb) - before
	}
	vanishing := newLocker(t, b.rdb, lock.MayVanish(), lock.WithLease(300*time.Millisecond))
	require.Zero(t, use(vanishing))
	require.Positive(t, use(newLocker(t, b.rdb, lock.WithLease(300*time.Millisecond))), "the size of the file shows locks")

	_, _, err := vanishing.TryEach(ctx, names, lock.For(50*time.Millisecond))
	require.NoError(t, err)
	testkit.Eventually(t, 30*time.Second, "the locks end", func() bool { return b.rdb.Exists(ctx, names...).Val() == 0 })
	held, _, err := vanishing.TryEach(ctx, names)
	require.NoError(t, err)
	require.NoError(t, held.Err())
	server.Kill()
	require.NoError(t, server.Restart(ctx))
	require.Zero(t, b.rdb.Exists(ctx, names...).Val())
	testkit.Eventually(t, 30*time.Second, "the holder learns of the loss", func() bool {
		return errors.Is(held.Err(), lock.ErrLost)
	})
}

// A release wakes nobody: who waits asks again.
func TestMayVanishIsWaitedForByPoll(t *testing.T) {
	b := setup(t)
	vanishing := newLocker(t, b.rdb, lock.MayVanish(), lock.WithPoll(20*time.Millisecond))
	held, err := vanishing.Acquire(t.Context(), b.key("ann"))
	require.NoError(t, err)
	got := make(chan error, 1)
	go func() {
		waiter := newLocker(t, b.rdb, lock.MayVanish(), lock.WithPoll(20*time.Millisecond))
		lease, err := waiter.Acquire(t.Context(), b.key("ann"))
		got <- errors.Join(err, lease.Release(t.Context()))
	}()
	require.NoError(t, held.Release(t.Context()))
	require.NoError(t, <-got)
}
