package lock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

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
