package lock_test

import (
	"context"
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

func TestOwnerInTheContextReenters(t *testing.T) {
	for name, outerFirst := range map[string]bool{"inner released first": false, "outer released first": true} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			outer := b.take(ctx, time.Minute, b.key("ann"))
			inside := map[*lock.Lease]context.Context{outer: outer.Context(ctx)}
			inner := b.take(inside[outer], time.Minute, b.key("ann"), b.key("bob"))
			inside[inner] = inner.Context(ctx)
			assert.False(t, outer.Holds(b.key("bob")), "it never had this key")
			assert.Zero(t, outer.Token(b.key("bob")))
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
			require.ErrorIs(t, context.Cause(inside[first]), lock.ErrReleased)
			require.NoError(t, inside[last].Err())
			_, busy, err := b.TryEach(ctx, []string{b.key("ann")}, lock.For(time.Minute))
			require.NoError(t, err)
			assert.Len(t, busy, 1, "one hold is left")

			require.NoError(t, last.Release(ctx))
			assert.Zero(t, b.depth(b.key("ann")))
			assert.Zero(t, b.depth(b.key("bob")))
		})
	}
}

func TestReentryExtendsALeaseAndNeverShortensIt(t *testing.T) {
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

func TestOwnerBelongsToItsLocker(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"))
	_, busy, err := newLocker(t, b.rdb).TryEach(outer.Context(ctx), []string{b.key("ann")}, lock.For(time.Minute))
	require.NoError(t, err)
	assert.Equal(t, []string{b.key("ann")}, busy)
}

func TestReentryIntoALostLockFails(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	require.NoError(t, b.rdb.Del(ctx, b.key("ann")).Err())
	inside := outer.Context(ctx)

	// An extension asks Redis and finds the loss.
	_, _, err := b.TryEach(inside, []string{b.key("cid"), b.key("ann"), b.key("bob")}, lock.For(2*time.Minute))
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, err))
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, outer.Err()), "the other lease of the owner learns of it too")
	<-inside.Done()
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, context.Cause(inside)))
	assert.Zero(t, b.depth(b.key("ann")), "a lost lock is not taken again")
	assert.Equal(t, 1, b.depth(b.key("bob")), "the owner keeps its other locks")
	assert.Zero(t, b.depth(b.key("cid")))

	alive := context.WithoutCancel(inside)
	_, _, err = b.TryEach(alive, []string{b.key("cid"), b.key("ann")})
	require.Equal(t, []string{b.key("ann")}, lostKeys(t, err), "the loss is now known without a call")
	assert.Zero(t, b.depth(b.key("cid")))

	require.Equal(t, []string{b.key("ann")}, lostKeys(t, outer.Release(ctx)))
	again := b.take(alive, time.Minute, b.key("ann"))
	require.NoError(t, again.Release(ctx), "after its release, the owner may take the lock again")
}

// lostKeys returns the keys of a *LostError.
func lostKeys(t *testing.T, err error) []string {
	t.Helper()
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	require.ErrorIs(t, err, lock.ErrLost)
	return lost.Keys
}

func TestGoroutinesWithOneContextShareTheLock(t *testing.T) {
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

func TestReentryMakesNoCallWhileTheLeaseIsValid(t *testing.T) {
	for name, terms := range map[string][]lock.AcquireOption{
		"a watched lease":   nil,
		"an explicit lease": {lock.For(time.Minute)},
	} {
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
				innermost, err := deeper(lock.For(time.Second)) // shorter than what is left
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
			assert.Equal(t, 1, c.calls(releaseCalls))
			for _, key := range keys {
				assert.Zero(t, b.depth(key))
			}
		})
	}
}

func TestReentryThatExtendsMakesOneCall(t *testing.T) {
	b := setup(t)
	ctx, names := t.Context(), b.names(100)
	outer := b.take(ctx, 10*time.Minute, names...)
	c := countCalls(t, b.rdb)
	inner, err := b.AcquireAll(outer.Context(ctx), names, lock.For(20*time.Minute))
	require.NoError(t, err)
	assert.Equal(t, 1, c.calls(renewalCalls))
	assert.Equal(t, 1, c.all())
	assert.Greater(t, b.rdb.PTTL(ctx, names[99]).Val(), 19*time.Minute)
	require.NoError(t, inner.Release(ctx))
	require.NoError(t, outer.Release(ctx))
}

func TestWatchedReentryRenewsAnExplicitLease(t *testing.T) {
	b := setup(t)
	ctx, key := t.Context(), b.key("ann")
	const explicit, watched = 3 * time.Second, 6 * time.Second
	b.Locker = newLocker(t, b.rdb, lock.WithLease(watched))
	c := countCalls(t, b.rdb)
	outer := b.take(ctx, explicit, key)
	held, ends := outer.Context(ctx), b.expiry(key)
	inner, err := b.Acquire(held, key)
	require.NoError(t, err)
	b.waitRenewed(key, ends)
	testkit.Eventually(t, startsWithin, "the end of the explicit lease", func() bool { return b.now().After(ends) })
	require.NoError(t, outer.Err(), "the inner lease renews it")
	require.NoError(t, held.Err())

	require.NoError(t, inner.Release(ctx))
	asked := c.calls(renewalCalls)
	awaitLoss(t, held, startsWithin)
	assert.LessOrEqual(t, c.calls(renewalCalls), asked+1, "except for a renewal in progress")
	require.Equal(t, []string{key}, lostKeys(t, outer.Release(ctx)))
}

// A goroutine waits behind other owners and shares its owner with a goroutine that gets the lock.
// If it kept its place, its owner would wait for itself.
func TestWaiterSharesTheLockThatItsOwnerGets(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	key := b.key("ann")
	family := b.take(t.Context(), never, b.key("of the owner")).Context(t.Context())
	wait := func(ctx context.Context, queued int) <-chan *lock.Lease {
		t.Helper()
		got := acquiringIn(ctx, t, b.Locker, []string{key})
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

// The owner gets the lock after one of its goroutines got a busy answer and before that goroutine
// joins the queue.
func TestWaiterDoesNotQueueForALockOfItsOwner(t *testing.T) {
	b, _ := setupWaiting(t, "ann")
	key := b.key("ann")
	var reported atomic.Bool
	busy, goOn := make(chan struct{}, 1), make(chan struct{})
	unblock := sync.OnceFunc(func() { close(goOn) })
	defer unblock()
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(never), lock.WithObserver(lock.Observer{Busy: func(int) {
		if reported.CompareAndSwap(false, true) {
			busy <- struct{}{}
			<-goOn
		}
	}}))
	family := b.take(t.Context(), never, b.key("of the owner")).Context(t.Context())
	c := countCalls(t, b.rdb)
	got := acquiringIn(family, t, b.Locker, []string{key})
	await(t, busy, startsWithin, "a busy answer")
	stranger := acquiring(t, b.Locker, key)
	b.waitQueued(key, 1)
	b.waitCalls(c, 3)                                     // the other waiter asks before and after its subscription
	require.NoError(t, b.rdb.Del(t.Context(), key).Err()) // sends no message
	sibling, err := b.TryAcquire(family, key)
	require.NoError(t, err)
	unblock()

	lease := await(t, got, startsWithin, "the lock that its owner has")
	assert.Equal(t, sibling.Token(key), lease.Token(key))
	require.NoError(t, lease.Release(t.Context()))
	require.NoError(t, sibling.Release(t.Context()))
	require.NoError(t, await(t, stranger, startsWithin, "the lock").Release(t.Context()))
}

// The first waiter reenters when a goroutine of its owner gets the lock, and gives up in a pause after
// a failed extension.
func TestWaiterThatGivesUpWhileItReentersLeavesTheQueue(t *testing.T) {
	b, holder := setupWaiting(t, "ann")
	ctx, key := t.Context(), b.key("ann")
	inside := b.take(ctx, time.Minute, b.key("bob")).Context(ctx)
	patient, giveUp := context.WithCancel(inside)
	c := countCalls(t, b.rdb)
	ended := make(chan error, 1)
	go func() {
		_, err := b.Acquire(patient, key, lock.For(lock.MaxLease))
		ended <- err
	}()
	b.waitQueued(key, 1)
	b.waitCalls(c, 2) // the second after the subscription: it must not find the key free

	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind != renewalCalls {
			return next(ctx, cmd)
		}
		cmd.SetErr(replied("LOADING Redis is loading the dataset in memory"))
		return cmd.Err()
	})
	require.NoError(t, b.rdb.Del(ctx, key).Err()) // sends no message
	mine, err := b.TryAcquire(inside, key, lock.For(time.Minute))
	require.NoError(t, err)
	testkit.Eventually(t, startsWithin, "a failed extension", func() bool { return c.calls(renewalCalls) > 0 })
	giveUp()
	require.ErrorIs(t, await(t, ended, startsWithin, "the end of the wait"), context.Canceled)
	assert.Zero(t, b.Waiting(key))

	c.answer(nil)
	require.NoError(t, mine.Release(ctx))
	require.ErrorIs(t, holder.Release(ctx), lock.ErrLost)
	soon, cancel := context.WithTimeout(ctx, startsWithin)
	defer cancel()
	next, err := b.Acquire(soon, key)
	require.NoError(t, err)
	require.NoError(t, next.Release(ctx))
}

func TestAcquireAllTakesAllKeysOrNone(t *testing.T) {
	b, holder := setupWaiting(t, "bob")
	ctx, c := t.Context(), countCalls(t, b.rdb)
	ann, bob, cid := b.key("ann"), b.key("bob"), b.key("cid")
	got := acquiringIn(ctx, t, b.Locker, []string{cid, bob, ann, bob})
	b.waitQueued(bob, 1)
	b.waitCalls(c, 2)

	// It holds none while it waits, so others can take the free ones.
	for _, key := range []string{ann, cid} {
		assert.Zero(t, b.depth(key))
		assert.Zero(t, b.Waiting(key))
		lease, err := b.TryAcquire(ctx, key)
		require.NoError(t, err)
		require.NoError(t, lease.Release(ctx))
	}

	require.NoError(t, holder.Release(ctx))
	all := await(t, got, startsWithin, "all locks")
	assert.Equal(t, []string{cid, bob, ann}, all.Keys(), "in the order of the request")
	for _, key := range all.Keys() {
		assert.Equal(t, 1, b.depth(key))
		assert.True(t, all.Holds(key))
		assert.Equal(t, all.Token(ann), all.Token(key), "taken in one step")
	}
	require.NoError(t, all.Release(ctx))
	for _, key := range []string{ann, bob, cid} {
		assert.Zero(t, b.depth(key))
	}
}

func TestAcquireAllWaitsForOneKeyAtATime(t *testing.T) {
	b, holdsAnn := setupWaiting(t, "ann")
	ctx, other := t.Context(), newLocker(t, b.rdb)
	ann, bob := b.key("ann"), b.key("bob")
	holdsBob, err := other.Acquire(ctx, bob, lock.For(never))
	require.NoError(t, err)

	got := acquiringIn(ctx, t, b.Locker, []string{ann, bob})
	b.waitQueued(ann, 1)
	require.NoError(t, holdsAnn.Release(ctx))
	b.waitQueued(bob, 1)
	assert.Zero(t, b.Waiting(ann))
	holdsAnn, err = other.TryAcquire(ctx, ann, lock.For(never))
	require.NoError(t, err, "a waiting AcquireAll holds no free lock")

	require.NoError(t, holdsBob.Release(ctx))
	b.waitQueued(ann, 1)
	assert.Zero(t, b.Waiting(bob))
	assert.Zero(t, b.depth(bob))
	require.NoError(t, holdsAnn.Release(ctx))
	require.NoError(t, await(t, got, startsWithin, "both locks").Release(ctx))
}

func TestAcquireAllKeepsItsPlaceWhenMoreKeysAreTaken(t *testing.T) {
	b, holdsBob := setupWaiting(t, "bob")
	ctx, ann, bob := t.Context(), b.key("ann"), b.key("bob")
	c := countCalls(t, b.rdb)
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(20*time.Millisecond))
	both := acquiringIn(ctx, t, b.Locker, []string{ann, bob})
	b.waitQueued(bob, 1)
	holdsAnn, err := newLocker(t, b.rdb).TryAcquire(ctx, ann, lock.For(never))
	require.NoError(t, err)
	asked := c.calls(acquireCalls)
	testkit.Eventually(t, startsWithin, "unsuccessful attempts", func() bool { return c.calls(acquireCalls) > asked+3 })
	assert.Equal(t, 1, b.Waiting(bob))
	assert.Zero(t, b.Waiting(ann))
	require.NoError(t, holdsBob.Release(ctx))
	b.waitQueued(ann, 1)
	require.NoError(t, holdsAnn.Release(ctx))
	require.NoError(t, await(t, both, startsWithin, "both locks").Release(ctx))
}

func TestAcquireAllLeavesAFreeLockToTheNextWaiter(t *testing.T) {
	b, holdsAnn := setupWaiting(t, "ann")
	ctx, ann, bob := t.Context(), b.key("ann"), b.key("bob")
	holdsBob, err := newLocker(t, b.rdb).Acquire(ctx, bob, lock.For(never))
	require.NoError(t, err)
	both := acquiringIn(ctx, t, b.Locker, []string{ann, bob})
	b.waitQueued(ann, 1)
	one := acquiring(t, b.Locker, ann)
	b.waitQueued(ann, 2)
	require.NoError(t, holdsAnn.Release(ctx))
	require.NoError(t, await(t, one, startsWithin, "the free lock").Release(ctx))
	require.NoError(t, holdsBob.Release(ctx))
	require.NoError(t, await(t, both, startsWithin, "both locks").Release(ctx))
}

// An owner keeps what it holds while it waits for the rest.
func TestAcquireAllWaitsOnlyForKeysThatItsOwnerDoesNotHold(t *testing.T) {
	b, holder := setupWaiting(t, "bob")
	ctx := t.Context()
	ann, bob := b.key("ann"), b.key("bob")
	outer := b.take(ctx, never, ann)
	stranger := acquiring(t, b.Locker, ann)
	b.waitQueued(ann, 1)

	got := acquiringIn(outer.Context(ctx), t, b.Locker, []string{ann, bob})
	b.waitQueued(bob, 1)
	require.NoError(t, outer.Err())
	assert.Equal(t, 1, b.Waiting(ann), "it does not queue behind the waiter for its own lock")
	require.NoError(t, holder.Release(ctx))
	inner := await(t, got, startsWithin, "both locks")
	assert.Equal(t, outer.Token(ann), inner.Token(ann))

	require.NoError(t, outer.Release(ctx))
	assert.Equal(t, 1, b.depth(ann))
	require.NoError(t, inner.Release(ctx))
	require.NoError(t, await(t, stranger, startsWithin, "the lock").Release(ctx))
}

func TestNoKeysMakeNoCall(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	all, err := b.AcquireAll(t.Context(), nil)
	require.NoError(t, err)
	for _, lease := range []*lock.Lease{all, b.take(t.Context(), time.Second)} {
		assert.Empty(t, lease.Keys())
		require.NoError(t, lease.Err())
		require.NoError(t, lease.Release(t.Context()))
	}
	assert.Zero(t, c.all())
}
