package lock_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/lock"
)

// A lock that a process releases is first left to the others that wait for it, or the process that hears of it first
// would hand it to itself for ever.
func TestAReleaseIsLeftToOtherProcessesFirst(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := locker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
	elsewhere := locker(t, b.rdb, lock.WithPoll(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	theirs := acquiring(t, elsewhere, key)
	b.waitListening(key, 1)
	ours := acquiring(t, here, key)
	b.waitListening(key, 2)
	testkit.Eventually(t, startsWithin, "the waiter here knows of the other one", func() bool { return here.Listeners(key) == 2 })

	require.NoError(t, held.Release(ctx))
	second := await(t, theirs, startsWithin, "the other process has it")
	assert.Empty(t, ours)
	require.NoError(t, second.Release(ctx))
	third := await(t, ours, startsWithin, "the lock, because the other process released it")
	require.NoError(t, third.Release(ctx))
}

func TestANewcomerWhereALockWasReleasedComesAfterOtherProcesses(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := locker(t, b.rdb, lock.WithYield(time.Second))
	elsewhere := locker(t, b.rdb, lock.WithPoll(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	theirs := acquiring(t, elsewhere, key)
	b.waitListening(key, 1)
	require.NoError(t, held.Release(ctx))
	ours := acquiring(t, here, key)
	second := await(t, theirs, startsWithin, "the other process has it")
	require.NoError(t, second.Release(ctx))
	third := await(t, ours, startsWithin, "the lock")
	assert.Greater(t, third.Token(key), second.Token(key))
	require.NoError(t, third.Release(ctx))
}

// Within one process, and where nobody waits, nothing is left to others: with such a yield, this would never end.
func TestNobodyElseListensSoNothingIsLeftToOthers(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	here := locker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
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
		held = await(t, acquiring(t, here, key), startsWithin, "the lock at once")
	}
	require.NoError(t, held.Release(ctx))
}

// Redis may have counted the listener of this process for a release, and say so when that listens no more.
func TestAListenerThatEndsBeforeTheAnswerIsNoOtherProcess(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	c := countCalls(t, b.rdb)
	here := locker(t, b.rdb, lock.WithPoll(never), lock.WithYield(never))
	held, err := here.Acquire(ctx, key, lock.For(never))
	require.NoError(t, err)
	next := acquiring(t, here, key)
	b.waitListening(key, 1)
	c.answer(func(kind int, process redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		err := process(ctx, cmd)
		if kind == releases {
			testkit.Eventually(t, startsWithin, "the listener here has ended", func() bool { return !here.Hears(key) })
		}
		return err
	})
	require.NoError(t, held.Release(ctx))
	c.answer(nil)
	require.NoError(t, await(t, next, startsWithin, "the lock").Release(ctx))
	third := await(t, acquiring(t, here, key), startsWithin, "the lock, which nobody else waits for")
	require.NoError(t, third.Release(ctx))
}
