package lock_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// A process leaves a lock that it released to the other processes that wait for it. Otherwise the
// process that receives the message first would give the lock to itself again and again.
func TestReleasedLockIsLeftToOtherProcessesFirst(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := newLocker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
	elsewhere := newLocker(t, b.rdb, lock.WithPoll(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	theirs := acquiring(t, elsewhere, key)
	b.waitListening(key, 1)
	ours := acquiring(t, here, key)
	b.waitListening(key, 2)
	testkit.Eventually(t, startsWithin, "the waiter here knows the other listener", func() bool {
		return here.Listeners(key) == 2
	})

	require.NoError(t, held.Release(ctx))
	second := await(t, theirs, startsWithin, "the lock in the other process")
	assert.Empty(t, ours)
	require.NoError(t, second.Release(ctx))
	third := await(t, ours, startsWithin, "the lock, released by the other process")
	require.NoError(t, third.Release(ctx))
}

func TestNewAcquireComesAfterOtherProcesses(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := newLocker(t, b.rdb, lock.WithYield(2*time.Second))
	elsewhere := newLocker(t, b.rdb, lock.WithPoll(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	theirs := acquiring(t, elsewhere, key)
	b.waitListening(key, 1)
	require.NoError(t, held.Release(ctx))
	ours := acquiring(t, here, key)
	second := await(t, theirs, startsWithin, "the lock in the other process")
	require.NoError(t, second.Release(ctx))
	third := await(t, ours, startsWithin, "the lock")
	assert.Greater(t, third.Token(key), second.Token(key))
	require.NoError(t, third.Release(ctx))
}

// Waiters here that hand the lock to each other get no busy answer, so only their releases can tell
// them of a process that came later. Without that it would wait as long as there are waiters here.
func TestWaitersLearnOfNewListenersFromReleases(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := newLocker(t, b.rdb, lock.WithPoll(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	first := acquiring(t, here, key, lock.For(never))
	testkit.Eventually(t, startsWithin, "the first waiter knows that no other process listens", func() bool {
		return here.Listeners(key) == 1
	})
	acquiring(t, here, key, lock.For(never))
	testkit.Eventually(t, startsWithin, "a second waiter", func() bool { return here.Waiting(key) == 2 })
	elsewhere := b.rdb.Subscribe(ctx, releaseChannel(key))
	defer func() { assert.NoError(t, elsewhere.Close()) }()
	b.waitListening(key, 2)

	require.NoError(t, held.Release(ctx))
	await(t, first, startsWithin, "the lock")
	testkit.Eventually(t, startsWithin, "the next waiter knows the other listener", func() bool {
		return here.Listeners(key) == 2
	})
}

// With this yield the test would not end if anything were left to other processes.
func TestLockIsNotLeftToOthersWithoutListeners(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := newLocker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	for range 20 {
		next := acquiring(t, here, key)
		b.waitListening(key, 1)
		require.NoError(t, held.Release(ctx))
		held = await(t, next, startsWithin, "the lock")
	}
	for range 20 {
		require.NoError(t, held.Release(ctx))
		held = await(t, acquiring(t, here, key), startsWithin, "the lock")
	}
	require.NoError(t, held.Release(ctx))
}

// Redis may have counted the listener of this process for a release, and its answer may arrive when
// that no longer listens.
func TestOwnEndedListenerDoesNotCountAsAnotherProcess(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	c := countCalls(t, b.rdb)
	here := newLocker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	next := acquiring(t, here, key)
	b.waitListening(key, 1)
	c.answer(func(kind int, process redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		err := process(ctx, cmd)
		if kind == releaseCalls {
			testkit.Eventually(t, startsWithin, "the end of the listener here", func() bool { return !here.MayListen(key) })
		}
		return err
	})
	require.NoError(t, held.Release(ctx))
	c.answer(nil)
	require.NoError(t, await(t, next, startsWithin, "the lock").Release(ctx))
	third := await(t, acquiring(t, here, key), startsWithin, "the lock, without other waiters")
	require.NoError(t, third.Release(ctx))
}

// The answer is lost, so a repeat does not say how many connections received the message.
func TestReleaseWithALostAnswerForgetsNoListener(t *testing.T) {
	b, proxy := setupLossy(t, lock.WithPoll(never), lock.WithYield(never))
	ctx, key := t.Context(), b.key("ann")
	held := b.take(ctx, never, key)
	acquiring(t, b.Locker, key)
	b.waitListening(key, 1)
	acquiring(t, newLocker(t, b.rdb, lock.WithPoll(never)), key, lock.For(never))
	b.waitListening(key, 2)
	require.NoError(t, b.rdb.Publish(ctx, releaseChannel(key), "0").Err())
	testkit.Eventually(t, startsWithin, "the waiter here knows the other listener", func() bool {
		return b.Listeners(key) == 2
	})
	proxy.Lose(1)
	require.NoError(t, held.Release(ctx))
	proxy.RequireLost(t)
	assert.Equal(t, 2, b.Listeners(key))
}
