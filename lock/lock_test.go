package lock_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
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

// bench is a Locker for one test, with its Redis and its own key names.
type bench struct {
	*lock.Locker
	t   *testing.T
	rdb *redis.Client
	key func(name string) string
}

func setup(t *testing.T) bench {
	t.Helper()
	t.Parallel()
	rdb, keys := testkit.Redis(t).(*redis.Client), testkit.Keys(t)
	return bench{newLocker(t, rdb), t, rdb, func(name string) string { return keys.Lock(0, name) }}
}

// locker returns a Locker that is closed when the test ends.
func newLocker(t testing.TB, rdb redis.UniversalClient, opts ...lock.Option) *lock.Locker {
	t.Helper()
	l := lock.New(rdb, opts...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = l.Close(ctx) // some tests leave lost leases or a stopped Redis
	})
	return l
}

func (b bench) names(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = b.key(strconv.Itoa(i))
	}
	return names
}

// bare is a key without braces.
func (b bench) bare(name string) string {
	return strings.NewReplacer("{", "", "}", "").Replace(b.key(name))
}

// take takes free keys with TryEach.
func (b bench) take(ctx context.Context, lease time.Duration, keys ...string) *lock.Lease {
	b.t.Helper()
	got, busy, err := b.TryEach(ctx, keys, lock.For(lease))
	require.NoError(b.t, err)
	require.Empty(b.t, busy)
	return got
}

// depth is the depth of a lock in Redis, 0 if it is free.
func (b bench) depth(key string) int {
	b.t.Helper()
	fields, err := b.rdb.HGetAll(b.t.Context(), key).Result()
	require.NoError(b.t, err)
	require.LessOrEqual(b.t, len(fields), 1, "a lock has one owner")
	for _, depth := range fields {
		n, err := strconv.Atoi(depth)
		require.NoError(b.t, err)
		return n
	}
	return 0
}

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

func TestLockIsAHashWithAnExpiry(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	b.take(ctx, time.Minute, b.key("ann"))

	fields, err := b.rdb.HGetAll(ctx, b.key("ann")).Result()
	require.NoError(t, err)
	require.Len(t, fields, 1)
	for owner, depth := range fields {
		assert.Regexp(t, `^[0-9a-f-]{36}:\d+$`, owner)
		assert.Equal(t, "1", depth)
	}
	left := b.rdb.PTTL(ctx, b.key("ann")).Val()
	assert.Positive(t, left)
	assert.LessOrEqual(t, left, time.Minute)
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

func TestLockHasOneOwnerAtATime(t *testing.T) {
	b := setup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute) // a lock that is never released would block the workers
	defer cancel()
	const workers, turns = 16, 30
	names := b.names(4)
	inside := make([]atomic.Int32, len(names))
	// Without the lock this is a data race and loses counts.
	counted := make([]int, len(names))
	var entered atomic.Int64

	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for done := 0; done < turns; {
				// Each worker takes other pairs in another order.
				one, other := (worker+done)%len(names), (3*worker+done+1)%len(names)
				lease, _, err := b.TryEach(ctx, []string{names[one], names[other]}, lock.For(time.Minute))
				if !assert.NoError(t, err) {
					return
				}
				for i, name := range names {
					if !lease.Holds(name) {
						continue
					}
					done++
					entered.Add(1)
					assert.Equal(t, int32(1), inside[i].Add(1), "two owners of %s", name)
					counted[i]++
					inside[i].Add(-1)
				}
				if !assert.NoError(t, lease.Release(ctx)) {
					return
				}
			}
		})
	}
	all.Wait()

	sum := 0
	for i, name := range names {
		sum += counted[i]
		assert.Zero(t, b.depth(name))
	}
	assert.EqualValues(t, entered.Load(), sum)
}

func TestLeaseEndsByItself(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const length = 2 * time.Second
	start := time.Now()
	first := b.take(ctx, length, b.key("ann"), b.key("bob"))
	require.NoError(t, b.rdb.Persist(ctx, b.key("bob")).Err()) // as if its lease was renewed

	var second *lock.Lease
	testkit.Eventually(t, startsWithin, "the end of the lease", func() bool {
		got, _, err := b.TryEach(ctx, []string{b.key("ann")}, lock.For(time.Minute))
		require.NoError(t, err)
		if !got.Holds(b.key("ann")) {
			return false
		}
		second = got
		return true
	})
	assert.GreaterOrEqual(t, time.Since(start), length)
	assert.False(t, first.Holds(b.key("ann")), "the first holder knows that its lease has ended")

	err := first.Release(ctx)
	require.ErrorIs(t, err, lock.ErrLost)
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, []string{b.key("ann"), b.key("bob")}, lost.Keys, "both leases have ended for the holder")
	assert.Zero(t, b.depth(b.key("bob")), "what Redis still has is released")

	assert.Equal(t, 1, b.depth(b.key("ann")), "the successor keeps its lock")
	require.NoError(t, second.Release(ctx))
	require.NoError(t, first.Release(ctx), "a loss is reported once")
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

func TestLostErrorStaysShort(t *testing.T) {
	b := setup(t)
	names := b.names(300)
	lease := b.take(t.Context(), time.Minute, names...)
	require.NoError(t, b.rdb.Del(t.Context(), names...).Err())

	err := lease.Release(t.Context())
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, names, lost.Keys)
	assert.ErrorContains(t, err, names[4]+" and 295 more")
}

func TestKeyOfAnotherTypeRejectsTheWholeCall(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	require.NoError(t, b.rdb.Set(ctx, b.key("bob"), "not a lock", 0).Err())
	_, _, err := b.TryEach(ctx, []string{b.key("ann"), b.key("bob"), b.key("cid")}, lock.For(time.Minute))
	assert.ErrorContains(t, err, "WRONGTYPE")
	assert.Zero(t, b.depth(b.key("ann")))
	assert.Zero(t, b.depth(b.key("cid")))
}

func TestOverwrittenLockIsLostAndTheRestReleased(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	lease := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"), b.key("cid"))
	require.NoError(t, b.rdb.Set(ctx, b.key("bob"), "not a lock", 0).Err())

	var lost *lock.LostError
	require.ErrorAs(t, lease.Release(ctx), &lost)
	assert.Equal(t, []string{b.key("bob")}, lost.Keys)
	assert.Zero(t, b.depth(b.key("ann")))
	assert.Zero(t, b.depth(b.key("cid")))
}

func TestTryEachAcceptsNoKeys(t *testing.T) {
	b := setup(t)
	lease := b.take(t.Context(), time.Second)
	assert.Empty(t, lease.Keys())
	require.NoError(t, lease.Release(t.Context()))
}

func TestReleaseWorksAfterItsContextEnded(t *testing.T) {
	b := setup(t)
	gone, cancel := context.WithCancel(t.Context())
	lease := b.take(gone, time.Minute, b.key("ann"))
	cancel()

	_, _, err := b.TryEach(gone, []string{b.key("bob")}, lock.For(time.Minute))
	require.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, b.depth(b.key("bob")))

	require.NoError(t, lease.Release(gone), "a release does not need the caller's context")
	assert.Zero(t, b.depth(b.key("ann")))
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
