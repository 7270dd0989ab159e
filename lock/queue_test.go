package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestWaiterIsWokenByTheRelease(t *testing.T) {
	for name, test := range map[string]struct {
		key     func(b bench) string
		release func(ctx context.Context, l *lock.Locker, lease *lock.Lease) error
	}{
		"a key with braces": {
			func(b bench) string { return b.key("ann") },
			func(ctx context.Context, _ *lock.Locker, lease *lock.Lease) error { return lease.Release(ctx) },
		},
		"a key without braces": {
			func(b bench) string { return b.bare("ann") },
			func(ctx context.Context, _ *lock.Locker, lease *lock.Lease) error { return lease.Release(ctx) },
		},
		"a release by force": {
			func(b bench) string { return b.key("ann") },
			func(ctx context.Context, l *lock.Locker, lease *lock.Lease) error {
				held, err := l.ForceRelease(ctx, lease.Keys()[0])
				if !held {
					return errors.Join(err, errors.New("the lock was not held"))
				}
				return err
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := setupWaiting(t)
			ctx, key := t.Context(), test.key(b)
			other := newLocker(t, b.rdb)
			holder, err := other.Acquire(ctx, key, lock.For(never))
			require.NoError(t, err)
			c := countCalls(t, b.rdb)
			got := acquiring(t, b.Locker, key)
			b.waitQueued(key, 1)
			b.waitCalls(c, 2) // the second after the subscription, because the lock may have been released before
			require.NoError(t, test.release(ctx, other, holder))
			second := await(t, got, startsWithin, "the lock of "+key)
			assert.Equal(t, 3, c.calls(acquireCalls))
			assert.Greater(t, second.Token(key), holder.Token(key))
			require.NoError(t, second.Release(ctx))
			assert.Zero(t, b.depth(key))
		})
	}
}

func TestWaiterPollsWithoutAMessage(t *testing.T) {
	b, _ := setupWaiting(t, "ann")
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(50*time.Millisecond))
	got := acquiring(t, b.Locker, b.key("ann"))
	b.waitQueued(b.key("ann"), 1)
	require.NoError(t, b.rdb.Del(t.Context(), b.key("ann")).Err()) // sends no message
	require.NoError(t, await(t, got, startsWithin, "the lock").Release(t.Context()))
}

func TestWaiterTakesALockWhenItsLeaseEnds(t *testing.T) {
	b, _ := setupWaiting(t)
	ctx, key := t.Context(), b.key("ann")
	const length = 2 * time.Second
	first, err := newLocker(t, b.rdb).Acquire(ctx, key, lock.For(length))
	require.NoError(t, err)
	second := await(t, acquiring(t, b.Locker, key), startsWithin, "the lock")
	assert.GreaterOrEqual(t, grantedAfter(key, first, second), length)
	require.NoError(t, second.Release(ctx))
}

// grantedAfter is the time between the grants of two leases: a token is the time of its grant by
// Redis's clock. Redis ends leases by whole milliseconds.
func grantedAfter(key string, first, second *lock.Lease) time.Duration {
	return time.Duration(second.Token(key)-first.Token(key))*time.Microsecond + time.Millisecond
}

func TestWaiterContinuesToWaitForARenewedLock(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	ctx, key := t.Context(), b.key("ann")
	const left, looks = 2 * time.Second, 3
	c := countCalls(t, b.rdb)
	looked := make(chan time.Time, looks)
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind != acquireCalls || c.calls(acquireCalls) == looks {
			return next(ctx, cmd)
		}
		// At each attempt the lock is about to end, and then it is renewed.
		looked <- time.Now()
		assert.True(t, b.rdb.PExpire(ctx, key, left).Val())
		err := next(ctx, cmd)
		assert.True(t, b.rdb.Persist(ctx, key).Val())
		return err
	})
	got := acquiring(t, b.Locker, key)
	b.waitCalls(c, looks)
	assert.Equal(t, 1, b.Waiting(key))
	<-looked
	second, third := <-looked, <-looked // the second attempt follows the subscription
	assert.GreaterOrEqual(t, third.Sub(second), left, "the next attempt comes when the lock would have ended")
	require.NoError(t, holder.Release(ctx))
	require.NoError(t, await(t, got, startsWithin, "the lock").Release(ctx))
}

// The next in the queue knows when the lease of the one before it ends.
func TestNextWaiterTakesALockWhenItsLeaseEnds(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	ctx, key := t.Context(), b.key("ann")
	const length = 2 * time.Second
	first := acquiring(t, b.Locker, key, lock.For(length))
	b.waitQueued(key, 1)
	second := acquiring(t, b.Locker, key)
	b.waitQueued(key, 2)
	require.NoError(t, holder.Release(ctx))
	silent := await(t, first, startsWithin, "the lock")
	next := await(t, second, startsWithin, "the lock after its lease")
	assert.GreaterOrEqual(t, grantedAfter(key, silent, next), length)
	require.ErrorIs(t, silent.Err(), lock.ErrLost)
	require.NoError(t, next.Release(ctx))
}

func TestOnlyTheFirstOfAQueueAsksRedis(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	ctx, key := t.Context(), b.key("ann")
	const waiters = 32
	c := countCalls(t, b.rdb)
	got := make([]<-chan *lock.Lease, waiters)
	for i := range got {
		got[i] = acquiring(t, b.Locker, key)
		b.waitQueued(key, i+1)
		b.waitCalls(c, 2) // of the first waiter
	}
	require.NoError(t, holder.Release(ctx))
	for i := range got {
		require.NoError(t, await(t, got[i], startsWithin, "the lock, in order").Release(ctx))
	}
	assert.LessOrEqual(t, c.calls(acquireCalls), 2+waiters+waiters/4,
		"a hand-over costs one call, and a connection may break")
}

func TestQueueMakesOneCallForEachPoll(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	ctx, key := t.Context(), b.key("ann")
	const waiters, polls, poll = 32, 12, 50 * time.Millisecond
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(poll))
	got := make([]<-chan *lock.Lease, waiters)
	for i := range got {
		got[i] = acquiring(t, b.Locker, key)
	}
	b.waitQueued(key, waiters)
	c := countCalls(t, b.rdb)
	began := time.Now()
	testkit.Eventually(t, startsWithin, "some polls", func() bool { return c.calls(acquireCalls) >= polls })
	asked, passed := c.calls(acquireCalls), time.Since(began)
	// One began before, and one follows the subscription.
	assert.LessOrEqual(t, asked, int(passed/poll)+3, "in %v", passed)
	require.NoError(t, holder.Release(ctx))
	for range got {
		require.NoError(t, b.first(got).Release(ctx))
	}
}

// first waits until one of the waiters has a lease.
func (b bench) first(waiting []<-chan *lock.Lease) (got *lock.Lease) {
	b.t.Helper()
	testkit.Eventually(b.t, startsWithin, "a lease of one of the waiters", func() bool {
		for _, leases := range waiting {
			select {
			case lease, open := <-leases:
				if open {
					got = lease
					return true
				}
			default:
			}
		}
		return false
	})
	return got
}

var errGone = errors.New("the caller is gone")

func TestCancelledWaiterLeavesTheQueue(t *testing.T) {
	for who, name := range []string{"the first", "the middle one", "the last"} {
		t.Run(name, func(t *testing.T) {
			b, holder := setupWaiting(t, "ann")
			key, c := b.key("ann"), countCalls(t, b.rdb)
			const waiters = 3
			var cancels [waiters]context.CancelCauseFunc
			var failed [waiters]chan error
			leases := make(chan int, waiters)
			for i := range waiters {
				ctx, cancel := context.WithCancelCause(t.Context())
				cancels[i], failed[i] = cancel, make(chan error, 1)
				go func() {
					lease, err := b.Acquire(ctx, key)
					failed[i] <- err
					if err == nil {
						leases <- i
						assert.NoError(t, lease.Release(ctx))
					}
				}()
				b.waitQueued(key, i+1)
			}
			b.waitCalls(c, 2)
			cancels[who](errGone)
			err := await(t, failed[who], startsWithin, "the error of the waiter that gave up")
			require.ErrorIs(t, err, errGone)
			require.ErrorContains(t, err, key)
			assert.Equal(t, waiters-1, b.Waiting(key))

			require.NoError(t, holder.Release(t.Context()))
			for i := range waiters {
				if i != who {
					require.NoError(t, await(t, failed[i], startsWithin, "the lock"))
					assert.Equal(t, i, <-leases, "in order")
				}
			}
			testkit.Eventually(t, startsWithin, "a free lock", func() bool { return b.depth(key) == 0 })
			for _, cancel := range cancels {
				cancel(nil)
			}
		})
	}
}

// The waiter that gives up may be the one that was woken by the release.
func TestNextWaiterAsksWhenTheFirstGivesUp(t *testing.T) {
	b, _ := setupWaiting(t, "ann")
	key := b.key("ann")
	c := countCalls(t, b.rdb)
	ctx, giveUp := context.WithTimeout(t.Context(), startsWithin)
	failed := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx, key)
		failed <- err
	}()
	b.waitQueued(key, 1)
	next := acquiring(t, b.Locker, key)
	b.waitQueued(key, 2)
	b.waitCalls(c, 2)
	require.NoError(t, b.rdb.Del(t.Context(), key).Err()) // sends no message
	giveUp()
	require.ErrorIs(t, await(t, failed, startsWithin, "the error"), context.Canceled)
	require.NoError(t, await(t, next, startsWithin, "the lock").Release(t.Context()))
}

func TestWaiterReturnsOnDeadline(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(never), lock.WithListenIdle(never))
	const patience = 50 * time.Millisecond
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := b.Acquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.GreaterOrEqual(t, time.Since(began), patience)
	assert.Zero(t, b.Waiting(b.key("ann")))
	b.waitListening(b.key("ann"), 0) // while the connection stays open
	require.NoError(t, holder.Release(t.Context()))
}

// The caller finds its own cause in the error, also if its context ended during a call to Redis.
func TestAcquireReturnsTheCauseOfItsContext(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	c := countCalls(t, b.rdb)
	for name, acquire := range map[string]func(ctx context.Context) error{
		"Acquire": func(ctx context.Context) error {
			_, err := b.Acquire(ctx, b.key("ann"))
			return err
		},
		"TryAcquire": func(ctx context.Context) error {
			_, err := b.TryAcquire(ctx, b.key("bob"))
			return err
		},
		"TryEach": func(ctx context.Context) error {
			_, _, err := b.TryEach(ctx, b.names(3))
			return err
		},
	} {
		ctx, giveUp := context.WithCancelCause(t.Context())
		c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
			if kind == acquireCalls {
				giveUp(errGone)
			}
			return next(ctx, cmd)
		})
		err := acquire(ctx)
		require.ErrorIs(t, err, errGone, name)
	}
	c.answer(nil)
	require.NoError(t, holder.Release(t.Context()))
	for _, key := range append(b.names(3), b.key("ann"), b.key("bob")) {
		assert.Zero(t, b.depth(key))
	}
}

func TestWaitersOfManyProcessesAllGetTheLock(t *testing.T) {
	b := setup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	const processes, waiters, turns = 8, 3, 5
	// Without the lock this is a data race and loses counts.
	counted := 0
	var all sync.WaitGroup
	for range processes {
		l := newLocker(t, b.rdb, lock.WithPoll(never)) // no waiter may be missed when all receive a message
		for range waiters {
			all.Go(func() {
				for range turns {
					err := l.Do(ctx, b.key("ann"), func(context.Context) error {
						counted++
						return nil
					})
					if !assert.NoError(t, err) {
						return
					}
				}
			})
		}
	}
	all.Wait()
	assert.Equal(t, processes*waiters*turns, counted)
	assert.Zero(t, b.depth(b.key("ann")))
}

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
