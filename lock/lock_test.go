package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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

func TestTryEachReturnsHeldAndBusyKeys(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	first := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))

	second, busy, err := b.TryEach(ctx, []string{b.key("cid"), b.key("bob"), b.key("dan"), b.key("ann")},
		lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{b.key("bob"), b.key("ann")}, busy)
	assert.Equal(t, []string{b.key("cid"), b.key("dan")}, second.Keys())
	assert.True(t, second.Holds(b.key("cid")))
	assert.False(t, second.Holds(b.key("bob")), "a busy key is not held")

	require.NoError(t, second.Release(ctx))
	assert.False(t, second.Holds(b.key("cid")))
	assert.Equal(t, 1, b.depth(b.key("bob")), "a release leaves other locks alone")
	require.NoError(t, first.Release(ctx))
	assert.Zero(t, b.depth(b.key("bob")))
	require.NoError(t, first.Release(ctx), "releasing twice is not an error")
}

func TestDuplicateKeyIsTakenOnce(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"), b.key("ann"))
	assert.Equal(t, []string{b.key("ann"), b.key("bob")}, lease.Keys())
	assert.Equal(t, 1, b.depth(b.key("ann")))

	_, busy, err := b.TryEach(ctx, []string{b.key("ann"), b.key("ann")}, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{b.key("ann")}, busy)

	require.NoError(t, lease.Release(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAnswerAfterTheLeaseIsALoss(t *testing.T) {
	b := setup(t)
	other := b.take(t.Context(), time.Minute, b.key("bob"))
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		late := time.After(lock.MinLease)
		err := next(ctx, cmd)
		<-late
		return err
	}))
	_, _, err := b.TryEach(t.Context(), []string{b.key("ann"), b.key("bob")}, lock.For(lock.MinLease))
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, []string{b.key("ann")}, lost.Keys)
	require.NoError(t, other.Release(t.Context()))
}

func TestLocksWorkAtMaxMemory(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	before := b.take(ctx, time.Minute, b.key("ann"))
	require.NoError(t, b.rdb.ConfigSet(ctx, "maxmemory", "1").Err())
	require.ErrorContains(t, b.rdb.HSet(ctx, "some", "thing", "more").Err(), "OOM")

	during := b.take(ctx, time.Minute, b.key("bob"))
	_, err := b.TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, lock.ErrBusy, "a busy answer leaves a receipt")
	deeper := b.take(before.Context(ctx), 2*time.Minute, b.key("ann"))
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), time.Minute, "a renewal")
	forced, err := b.ForceRelease(ctx, b.key("bob"))
	require.NoError(t, err)
	require.True(t, forced)
	require.ErrorIs(t, during.Release(ctx), lock.ErrLost)
	for _, lease := range []*lock.Lease{deeper, before} {
		require.NoError(t, lease.Release(ctx))
	}
	assert.Zero(t, b.depth(b.key("ann")))
	assert.Zero(t, b.depth(b.key("bob")))
}

// Redis forgets the scripts before each kind of call.
func TestCallsSucceedAfterScriptFlush(t *testing.T) {
	_, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	forget := func() {
		t.Helper()
		var known *redis.BoolSliceCmd
		_, err := b.rdb.TxPipelined(ctx, func(tx redis.Pipeliner) error { // the waiter may ask between two commands
			tx.ScriptFlush(ctx)
			known = tx.ScriptExists(ctx, lua.LockAcquire.Hash(), lua.LockRelease.Hash(), lua.LockRenew.Hash())
			return nil
		})
		require.NoError(t, err)
		require.NotContains(t, known.Val(), true)
	}
	keeper := newLocker(t, b.rdb, lock.WithLease(4*time.Second))
	waiter := newLocker(t, b.rdb, lock.WithPoll(never))

	forget()
	lease, err := keeper.Acquire(ctx, key)
	require.NoError(t, err)
	forget()
	waiting := acquiring(t, waiter, key)
	b.waitListening(key, 1)
	forget()
	b.waitRenewed(key, b.expiry(key))
	require.NoError(t, lease.Err())
	forget()
	require.NoError(t, lease.Release(ctx))
	next := await(t, waiting, startsWithin, "the lock")
	forget()
	require.NoError(t, next.Release(ctx))
	forget()
	forced, err := keeper.ForceRelease(ctx, key)
	require.NoError(t, err)
	assert.False(t, forced)
}

func BenchmarkTryEachAndRelease(b *testing.B) {
	rdb, keys := testkit.Redis(b), testkit.Keys(b)
	locker := newLocker(b, rdb)
	for _, n := range []int{1, 64, 512} {
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			names := make([]string, n)
			for i := range names {
				names[i] = keys.Lock(0, strconv.Itoa(i))
			}
			for b.Loop() {
				lease, _, err := locker.TryEach(b.Context(), names, lock.For(time.Minute))
				if err != nil {
					b.Fatal(err)
				}
				if err := lease.Release(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/lock")
		})
	}
}

// The lease keeps the locks that it has not lost.
func TestNextRenewalFindsALoss(t *testing.T) {
	for name, lose := range map[string]func(b bench, key string){
		"Redis lost it": func(b bench, key string) {
			require.NoError(b.t, b.rdb.Del(b.t.Context(), key).Err())
		},
		"an operator releases it by force": func(b bench, key string) {
			held, err := newLocker(b.t, b.rdb).ForceRelease(b.t.Context(), key)
			require.NoError(b.t, err)
			require.True(b.t, held)
		},
		"another owner takes it": func(b bench, key string) {
			_, err := newLocker(b.t, b.rdb).ForceRelease(b.t.Context(), key)
			require.NoError(b.t, err)
			b.take(b.t.Context(), time.Minute, key)
		},
		"its key has another type": func(b bench, key string) {
			require.NoError(b.t, b.rdb.Set(b.t.Context(), key, "not a lock", 0).Err())
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			ann, bob := b.key("ann"), b.key("bob")
			c := countCalls(t, b.rdb)
			lease, err := newLocker(t, b.rdb, lock.WithLease(4*time.Second)).AcquireAll(ctx, []string{ann, bob})
			require.NoError(t, err)
			held, token := lease.Context(ctx), lease.Token(ann)
			lose(b, ann)
			before := c.calls(renewalCalls)
			require.NoError(t, lease.Err(), "the loss is not known yet")

			awaitLoss(t, held, startsWithin)
			assert.LessOrEqual(t, c.calls(renewalCalls), before+1, "found by a renewal, not by the end of the lease")
			require.Equal(t, []string{ann}, lostKeys(t, context.Cause(held)))
			require.Equal(t, []string{ann}, lostKeys(t, lease.Err()))
			assert.False(t, lease.Holds(ann))
			assert.True(t, lease.Holds(bob))
			assert.Equal(t, []string{ann, bob}, lease.Keys(), "the keys that it got")
			assert.Equal(t, token, lease.Token(ann))
			b.waitRenewed(bob, b.expiry(bob))

			require.Equal(t, []string{ann}, lostKeys(t, lease.Release(ctx)))
			assert.Zero(t, b.depth(bob))
			require.Equal(t, []string{ann}, lostKeys(t, lease.Err()), "the error stays")
			require.NoError(t, lease.Release(ctx), "a loss is reported once")
		})
	}
}

// Redis still has the lock.
func TestExplicitLeaseEndsWithoutACallToRedis(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const length = 2 * time.Second
	key := b.key("ann")
	began := time.Now()
	lease := b.take(ctx, length, key)
	require.NoError(t, b.rdb.Persist(ctx, key).Err())
	c := countCalls(t, b.rdb)
	before := c.all()
	held := lease.Context(ctx)
	second := lease.Context(ctx)

	reported := awaitLoss(t, held, startsWithin)
	awaitLoss(t, second, startsWithin)
	assert.GreaterOrEqual(t, reported.Sub(began), length-length/100-2*time.Millisecond, "not before the end")
	require.Equal(t, []string{key}, lostKeys(t, lease.Err()))
	assert.False(t, lease.Holds(key))
	assert.Equal(t, before, c.all(), "no call to Redis")
	assert.Equal(t, 1, b.depth(key))
	require.Equal(t, []string{key}, lostKeys(t, context.Cause(lease.Context(ctx))),
		"a context that is created after the end")
	require.Equal(t, []string{key}, lostKeys(t, lease.Release(ctx)), "its holder has seen the loss")
	assert.Zero(t, b.depth(key), "what Redis still has is released")
}

func TestLossIsReportedToAllLeasesOfALock(t *testing.T) {
	for name, watched := range map[string][]bool{
		"both watched":               {true, true},
		"only the outer one watched": {true, false}, "only the inner one watched": {false, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			key := b.key("ann")
			b.Locker = newLocker(t, b.rdb, lock.WithLease(3*time.Second))
			terms := map[bool][]lock.AcquireOption{true: nil, false: {lock.For(2 * time.Second)}}
			outer, err := b.Acquire(ctx, key, terms[watched[0]]...)
			require.NoError(t, err)
			first := outer.Context(ctx)
			inner, err := b.Acquire(first, key, terms[watched[1]]...)
			require.NoError(t, err)
			second := inner.Context(ctx)
			inside := inner.Context(first)
			require.NoError(t, b.rdb.Del(ctx, key).Err())
			for _, held := range []context.Context{first, second, inside} {
				awaitLoss(t, held, startsWithin)
				require.Equal(t, []string{key}, lostKeys(t, context.Cause(held)))
			}
			for _, lease := range []*lock.Lease{outer, inner} {
				require.Equal(t, []string{key}, lostKeys(t, lease.Err()))
				require.Equal(t, []string{key}, lostKeys(t, lease.Release(ctx)))
			}
		})
	}
}

func TestEndOfAParentContextDoesNotEndTheLease(t *testing.T) {
	b := setup(t)
	lease := b.take(t.Context(), time.Minute, b.key("ann"))
	why := errors.New("the caller has had enough")
	for range 100 {
		parent, cancel := context.WithCancelCause(t.Context())
		held := lease.Context(parent)
		require.NoError(t, held.Err())
		cancel(why)
		require.ErrorIs(t, context.Cause(held), why)
		require.ErrorIs(t, context.Cause(lease.Context(parent)), why, "also if the parent has already ended")
	}
	testkit.Eventually(t, startsWithin, "removal of callbacks of ended contexts", func() bool {
		return lease.Callbacks() == 0
	})
	require.NoError(t, lease.Err())
	assert.True(t, lease.Holds(b.key("ann")))
	other := lease.Context(t.Context())
	require.NoError(t, other.Err())
	assert.Equal(t, 1, lease.Callbacks())
	require.NoError(t, lease.Release(t.Context()))
	require.ErrorIs(t, context.Cause(other), lock.ErrReleased)
	require.ErrorIs(t, lease.Err(), lock.ErrReleased)
	require.ErrorIs(t, context.Cause(lease.Context(t.Context())), lock.ErrReleased)
	assert.Zero(t, lease.Callbacks())
}

func TestConcurrentReleasesMakeOneCallAndReportALossOnce(t *testing.T) {
	for name, lost := range map[string]bool{"held": false, "lost": true} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			c := countCalls(t, b.rdb)
			lease := b.take(ctx, time.Minute, b.key("ann"))
			held := lease.Context(ctx)
			if lost {
				require.NoError(t, b.rdb.Del(ctx, b.key("ann")).Err())
			}
			var reported atomic.Int64
			var all sync.WaitGroup
			for range 20 {
				all.Go(func() {
					err := lease.Release(ctx)
					if err != nil {
						assert.ErrorIs(t, err, lock.ErrLost)
						reported.Add(1)
					}
					assert.ErrorIs(t, lease.Err(), lock.ErrReleased)
					assert.ErrorIs(t, context.Cause(held), lock.ErrReleased)
				})
			}
			all.Wait()
			assert.Equal(t, 1, c.calls(releaseCalls))
			assert.Equal(t, map[bool]int64{false: 0, true: 1}[lost], reported.Load())
			assert.Zero(t, b.depth(b.key("ann")))
		})
	}
}

// The holder must not go on with a lock that may be gone.
func TestReleaseEndsTheLeaseBeforeRedisAnswers(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"))
	held := lease.Context(ctx)
	c := countCalls(t, b.rdb)
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		assert.ErrorIs(t, context.Cause(held), lock.ErrReleased)
		assert.ErrorIs(t, lease.Err(), lock.ErrReleased)
		return next(ctx, cmd)
	})
	gone, cancel := context.WithDeadline(ctx, time.Now())
	defer cancel()
	require.NoError(t, lease.Release(gone), "with a timeout of its own")
	assert.Equal(t, 1, c.calls(releaseCalls))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestDoReturnsErrorsOfItsFunctionAndItsRelease(t *testing.T) {
	failed := errors.New("f failed")
	for name, test := range map[string]struct {
		f    func(b bench, ctx context.Context) error
		want []error
	}{
		"succeeds": {func(b bench, ctx context.Context) error {
			assert.Equal(b.t, 1, b.depth(b.key("ann")))
			return nil
		}, nil},
		"fails": {func(bench, context.Context) error { return failed }, []error{failed}},
		"reenters the lock": {func(b bench, ctx context.Context) error {
			return b.Do(ctx, b.key("ann"), func(context.Context) error { return failed })
		}, []error{failed}},
		"loses the lock": {func(b bench, ctx context.Context) error {
			return b.rdb.Del(ctx, b.key("ann")).Err()
		}, []error{lock.ErrLost}},
		"fails and loses the lock": {func(b bench, ctx context.Context) error {
			return errors.Join(failed, b.rdb.Del(ctx, b.key("ann")).Err())
		}, []error{failed, lock.ErrLost}},
		"learns of the loss": {func(b bench, ctx context.Context) error {
			require.NoError(b.t, b.rdb.Del(ctx, b.key("ann")).Err())
			awaitLoss(b.t, ctx, startsWithin)
			return failed
		}, []error{failed, lock.ErrLost}},
	} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			b.Locker = newLocker(t, b.rdb, lock.WithLease(3*time.Second))
			var inside context.Context
			err := b.Do(t.Context(), b.key("ann"), func(ctx context.Context) error {
				inside = ctx
				return test.f(b, ctx)
			})
			for _, want := range test.want {
				require.ErrorIs(t, err, want)
			}
			if len(test.want) == 0 {
				require.NoError(t, err)
			}
			if !errors.Is(err, lock.ErrLost) {
				require.ErrorIs(t, context.Cause(inside), lock.ErrReleased)
			}
			require.Error(t, inside.Err())
			assert.Zero(t, b.depth(b.key("ann")))
		})
	}
}

func TestDoReleasesAfterAPanicOrACancelledContext(t *testing.T) {
	b := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	require.PanicsWithValue(t, "no more", func() {
		_ = b.Do(ctx, b.key("ann"), func(context.Context) error { panic("no more") })
	})
	require.Zero(t, b.depth(b.key("ann")))
	require.NoError(t, b.Do(ctx, b.key("ann"), func(context.Context) error {
		cancel()
		return nil
	}))
	assert.Zero(t, b.depth(b.key("ann")))
	err := b.Do(ctx, b.key("ann"), func(context.Context) error { panic("not called") })
	require.ErrorIs(t, err, context.Canceled)
}
