package lock_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
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
