//go:build system

package lock_test

import (
	"context"
	"runtime"
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

// The leases are held for longer than their length. Two rounds of renewals are at least a twentieth
// of the lease apart, on any machine, because a round includes what is due in that time. Only the
// last call of a round names fewer than 256 locks.
func TestTenThousandLeasesNeedFewCallsAndGoroutines(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const (
		locks, callers  = 10_000, 16
		length          = 8 * time.Second
		renewalsPerCall = 256
		closeCalls      = 16
		together        = length / 20
		// due is the shortest time between two renewals of a lock: a third of the lease, less the
		// drift and the batch window.
		due = length/3 - length/100 - 2*time.Millisecond - together
	)
	c := countCalls(t, b.rdb)
	var underWay, atOnce atomic.Int64 // releases
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			now := underWay.Add(1)
			defer underWay.Add(-1)
			for was := atOnce.Load(); now > was && !atOnce.CompareAndSwap(was, now); was = atOnce.Load() {
			}
		}
		return next(ctx, cmd)
	})
	l := newLocker(t, b.rdb, lock.WithLease(length))
	names := b.names(locks)
	leases := make([]*lock.Lease, locks)
	var all sync.WaitGroup
	for caller := range callers {
		all.Go(func() {
			for i := caller; i < locks; i += callers {
				var err error
				if leases[i], err = l.Acquire(ctx, names[i]); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	require.False(t, t.Failed())
	held := leases[0].Context(ctx)

	began, before := time.Now(), len(c.renewedKeys())
	goroutines := 0
	testkit.Eventually(t, length+startsWithin, "a whole lease", func() bool {
		goroutines = max(goroutines, runtime.NumGoroutine()) // of all running tests
		return time.Since(began) > length
	})
	sizes := c.renewedKeys()
	window := time.Since(began)
	for _, lease := range leases {
		require.NoError(t, lease.Err())
	}
	require.NoError(t, held.Err())
	there, err := b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	require.EqualValues(t, locks, there)
	assert.Less(t, goroutines, locks/4)

	calls, keys := len(sizes)-before, 0
	for _, size := range sizes[before:] {
		keys += size
	}
	t.Logf("%d calls for %d renewals in %v, %d goroutines", calls, keys, window, goroutines)
	assert.LessOrEqual(t, slices.Max(sizes), renewalsPerCall)
	assert.GreaterOrEqual(t, keys, locks, "each at least once in a lease")
	assert.LessOrEqual(t, keys, locks*int(window/due+2), "about every third of a lease at most")
	rounds := int(window/together) + 3 // the window cuts the rounds at its ends
	assert.LessOrEqual(t, calls, keys/renewalsPerCall+rounds)

	if err := l.Close(ctx); err != nil { // on a slow machine, some leases end before their release
		require.ErrorIs(t, err, lock.ErrLost)
	}
	assert.Equal(t, locks, c.of(releaseCalls))
	assert.LessOrEqual(t, atOnce.Load(), int64(closeCalls), "Close leaves connections for others")
	there, err = b.rdb.Exists(ctx, names...).Result()
	require.NoError(t, err)
	assert.Zero(t, there)
	require.ErrorIs(t, context.Cause(held), lock.ErrClosed)
}
