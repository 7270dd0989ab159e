package lock_test

import (
	"context"
	"fmt"
	"strconv"
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
