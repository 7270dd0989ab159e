package lock_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/lock"
)

func TestTheOwnerInTheContextGoesDeeper(t *testing.T) {
	for name, outerFirst := range map[string]bool{"inner released first": false, "outer released first": true} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			outer := b.take(ctx, time.Minute, b.key("ann"))
			inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"), b.key("bob"))
			assert.Equal(t, inner.Token(b.key("ann")), outer.Token(b.key("ann")))
			assert.Greater(t, inner.Token(b.key("bob")), outer.Token(b.key("ann")))
			assert.Equal(t, 1, b.depth(b.key("bob")))

			first, last := inner, outer
			if outerFirst {
				first, last = outer, inner
			}
			require.NoError(t, first.Release(ctx))
			assert.Equal(t, 1, b.depth(b.key("ann")))
			assert.False(t, first.Holds(b.key("ann")))
			assert.True(t, last.Holds(b.key("ann")))
			_, busy, err := b.TryEach(ctx, []string{b.key("ann")}, lock.For(time.Minute))
			require.NoError(t, err)
			assert.Len(t, busy, 1, "one hold is left")

			require.NoError(t, last.Release(ctx))
			assert.Zero(t, b.depth(b.key("ann")))
			assert.Zero(t, b.depth(b.key("bob")))
		})
	}
}

func TestADeeperHoldLengthensWhatIsLeftAndNeverShortensIt(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, 10*time.Minute, b.key("ann"))
	shorter := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), 9*time.Minute)
	longer := b.take(outer.Context(ctx), 20*time.Minute, b.key("ann"))
	assert.Greater(t, b.rdb.PTTL(ctx, b.key("ann")).Val(), 19*time.Minute)
	for _, lease := range []*lock.Lease{shorter, longer, outer} {
		require.NoError(t, lease.Release(ctx))
	}
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestAnOwnerIsKnownToItsLockerOnly(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))
	_, busy, err := locker(t, b.rdb).TryEach(outer.Context(ctx), []string{b.key("ann")}, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{b.key("ann")}, busy)
}

func TestGoingDeeperIntoALostLockIsRefused(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	require.NoError(t, b.rdb.Del(ctx, b.key("ann")).Err())
	inside := outer.Context(ctx)

	// To make it last longer, Redis has to be asked, and the loss is found.
	_, _, err := b.TryEach(inside, []string{b.key("cid"), b.key("ann"), b.key("bob")}, lock.For(2*time.Minute))
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, err))
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, outer.Err()), "the other lease of the owner knows it too")
	<-inside.Done()
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, context.Cause(inside)))
	assert.Zero(t, b.depth(b.key("ann")), "it is not taken anew")
	assert.Equal(t, 1, b.depth(b.key("bob")), "and what the owner has, it keeps")
	assert.Zero(t, b.depth(b.key("cid")))

	alive := context.WithoutCancel(inside)
	_, _, err = b.TryEach(alive, []string{b.key("cid"), b.key("ann")})
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, err), "now it is known without asking")
	assert.Zero(t, b.depth(b.key("cid")))

	require.Equal(t, []string{b.key("ann")}, lostKeys(t, outer.Release(ctx)))
	again := b.take(alive, time.Minute, b.key("ann"))
	require.NoError(t, again.Release(ctx), "once released, the owner may start afresh")
}

// lostKeys are the keys of a *LostError.
func lostKeys(t *testing.T, err error) []string {
	t.Helper()
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	require.ErrorIs(t, err, lock.ErrLost)
	return lost.Keys
}

func TestGoroutinesThatShareAContextShareTheLock(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))
	shared := outer.Context(ctx)
	const holders = 20
	leases := make([]*lock.Lease, holders)
	var all sync.WaitGroup
	for i := range leases {
		all.Go(func() {
			lease, _, err := b.TryEach(shared, []string{b.key("ann")}, lock.For(time.Minute))
			if assert.NoError(t, err) {
				leases[i] = lease
			}
		})
	}
	all.Wait()
	for _, lease := range leases {
		require.Equal(t, []string{b.key("ann")}, lease.Keys())
		all.Go(func() { assert.NoError(t, lease.Release(ctx)) })
	}
	all.Wait()
	assert.Equal(t, 1, b.depth(b.key("ann")))
	require.NoError(t, outer.Release(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}

func TestGoingDeeperAsksNobodyWhileTheLeaseIsGood(t *testing.T) {
	for name, terms := range map[string][]lock.AcquireOption{"a watched lease": nil, "an explicit lease": {lock.For(time.Minute)}} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			keys := b.names(2)
			outer, err := b.AcquireAll(t.Context(), keys, terms...)
			require.NoError(t, err)
			c, ctx := countCalls(t, b.rdb), outer.Context(t.Context())
			for what, deeper := range map[string]func(opts ...lock.AcquireOption) (*lock.Lease, error){
				"Acquire":    func(opts ...lock.AcquireOption) (*lock.Lease, error) { return b.Acquire(ctx, keys[0], opts...) },
				"TryAcquire": func(opts ...lock.AcquireOption) (*lock.Lease, error) { return b.TryAcquire(ctx, keys[0], opts...) },
				"AcquireAll": func(opts ...lock.AcquireOption) (*lock.Lease, error) { return b.AcquireAll(ctx, keys, opts...) },
				"TryEach": func(opts ...lock.AcquireOption) (*lock.Lease, error) {
					lease, busy, err := b.TryEach(ctx, keys, opts...)
					assert.Empty(t, busy)
					return lease, err
				},
			} {
				inner, err := deeper()
				require.NoError(t, err, what)
				innermost, err := deeper(lock.For(time.Second)) // which is less than there is left
				require.NoError(t, err, what)
				for _, lease := range []*lock.Lease{inner, innermost} {
					require.NoError(t, lease.Err(), what)
					assert.Equal(t, outer.Token(keys[0]), lease.Token(keys[0]), what)
					require.NoError(t, lease.Release(ctx), what)
				}
			}
			require.NoError(t, b.Do(ctx, keys[0], func(ctx context.Context) error {
				return b.Do(ctx, keys[1], func(context.Context) error { return nil })
			}))
			assert.Zero(t, c.all())
			require.NoError(t, outer.Release(ctx))
			assert.Equal(t, 1, c.of(releases))
			for _, key := range keys {
				assert.Zero(t, b.depth(key))
			}
		})
	}
}

func TestGoingDeeperForLongerCostsOneCall(t *testing.T) {
	b := setup(t)
	ctx, names := t.Context(), b.names(100)
	outer := b.take(ctx, 10*time.Minute, names...)
	c := countCalls(t, b.rdb)
	inner, err := b.AcquireAll(outer.Context(ctx), names, lock.For(20*time.Minute))
	require.NoError(t, err)
	assert.Equal(t, 1, c.of(renewals))
	assert.Equal(t, 1, c.all())
	assert.Greater(t, b.rdb.PTTL(ctx, names[99]).Val(), 19*time.Minute)
	require.NoError(t, inner.Release(ctx))
	require.NoError(t, outer.Release(ctx))
}

func TestAWatchedLeaseWithinAnExplicitOneKeepsItUpAsLongAsItLives(t *testing.T) {
	b := setup(t)
	ctx, key := t.Context(), b.key("ann")
	const explicit, watched = 900 * time.Millisecond, 1800 * time.Millisecond
	b.Locker = locker(t, b.rdb, lock.WithLease(watched))
	c := countCalls(t, b.rdb)
	outer := b.take(ctx, explicit, key)
	held, ends := outer.Context(ctx), b.expiry(key)
	inner, err := b.Acquire(held, key)
	require.NoError(t, err)
	b.waitRenewed(key, ends)
	testkit.Eventually(t, startsWithin, "the end of the explicit lease", func() bool { return b.now().After(ends) })
	require.NoError(t, outer.Err(), "which is kept up")
	require.NoError(t, held.Err())

	require.NoError(t, inner.Release(ctx))
	asked := c.of(renewals)
	awaitLoss(t, held, startsWithin)
	assert.LessOrEqual(t, c.of(renewals), asked+1, "but for one that was under way")
	require.Equal(t, []string{key}, lostKeys(t, outer.Release(ctx)))
}

// A goroutine that waits for a lock behind strangers shares the owner with one that gets it. If it stood in line,
// its owner would wait for itself.
func TestAWaiterGetsTheLockTogetherWithItsOwner(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	key := b.key("ann")
	family := b.take(t.Context(), never, b.key("of the owner")).Context(t.Context())
	wait := func(ctx context.Context, queued int) <-chan *lock.Lease {
		t.Helper()
		got := acquiringAll(t, b.Locker, ctx, key)
		b.waitQueued(key, queued)
		return got
	}
	first := wait(family, 1)
	stranger := wait(t.Context(), 2)
	second, third := wait(family, 3), wait(family, 4)
	require.NoError(t, holder.Release(t.Context()))
	leases := []*lock.Lease{
		await(t, first, startsWithin, "the lock"),
		await(t, second, startsWithin, "the lock that its owner has"),
		await(t, third, startsWithin, "the lock that its owner has"),
	}
	assert.Equal(t, 1, b.Waiting(key), "the stranger")
	for _, lease := range leases {
		assert.Equal(t, leases[0].Token(key), lease.Token(key))
		assert.Equal(t, 1, b.depth(key))
		require.NoError(t, lease.Release(t.Context()))
	}
	require.NoError(t, await(t, stranger, startsWithin, "the lock").Release(t.Context()))
}

// The owner gets the lock after a goroutine of it was told that it is busy, and before that one stands in line.
func TestAWaiterWhoseOwnerGotTheLockInTheMeantimeDoesNotStandInLine(t *testing.T) {
	b, _ := setupWaiting(t, "ann")
	key := b.key("ann")
	var told atomic.Bool
	busy, goOn := make(chan struct{}, 1), make(chan struct{})
	unblock := sync.OnceFunc(func() { close(goOn) })
	defer unblock()
	b.Locker = locker(t, b.rdb, lock.WithPoll(never), lock.WithObserver(lock.Observer{Busy: func(int) {
		if told.CompareAndSwap(false, true) {
			busy <- struct{}{}
			<-goOn
		}
	}}))
	family := b.take(t.Context(), never, b.key("of the owner")).Context(t.Context())
	c := countCalls(t, b.rdb)
	got := acquiringAll(t, b.Locker, family, key)
	await(t, busy, startsWithin, "the answer that the lock is busy")
	stranger := acquiring(t, b.Locker, key)
	b.waitQueued(key, 1)
	b.waitCalls(c, 3)                                     // the stranger has looked before and after it was subscribed
	require.NoError(t, b.rdb.Del(t.Context(), key).Err()) // tells nobody
	sibling, err := b.TryAcquire(family, key)
	require.NoError(t, err)
	unblock()

	lease := await(t, got, startsWithin, "the lock that its owner has")
	assert.Equal(t, sibling.Token(key), lease.Token(key))
	require.NoError(t, lease.Release(t.Context()))
	require.NoError(t, sibling.Release(t.Context()))
	require.NoError(t, await(t, stranger, startsWithin, "the lock").Release(t.Context()))
}
