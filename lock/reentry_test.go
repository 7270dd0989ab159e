package lock_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/lock"
)

func TestTheOwnerInTheContextGoesDeeper(t *testing.T) {
	for name, outerFirst := range map[string]bool{"inner released first": false, "outer released first": true} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			outer := b.take(ctx, time.Minute, b.key("ann"))
			inner := b.take(outer.Context(ctx), time.Minute, b.key("ann"), b.key("bob"))
			assert.Equal(t, 2, b.depth(b.key("ann")))
			assert.Equal(t, 1, b.depth(b.key("bob")))

			first, last := inner, outer
			if outerFirst {
				first, last = outer, inner
			}
			require.NoError(t, first.Release(ctx))
			assert.Equal(t, 1, b.depth(b.key("ann")))
			assert.False(t, first.Holds(b.key("ann")))
			assert.True(t, last.Holds(b.key("ann")))
			_, busy, err := b.TryEach(ctx, []string{b.key("ann")}, time.Minute)
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
	_, busy, err := lock.New(b.rdb).TryEach(outer.Context(ctx), []string{b.key("ann")}, time.Minute)
	require.NoError(t, err)
	assert.Equal(t, []string{b.key("ann")}, busy)
}

func TestGoingDeeperIntoALostLockIsRefused(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	outer := b.take(ctx, time.Minute, b.key("ann"), b.key("bob"))
	require.NoError(t, b.rdb.Del(ctx, b.key("ann")).Err())

	_, _, err := b.TryEach(outer.Context(ctx), []string{b.key("cid"), b.key("ann"), b.key("bob")}, time.Minute)
	var lost *lock.LostError
	require.ErrorAs(t, err, &lost)
	assert.Equal(t, []string{b.key("ann")}, lost.Keys)
	assert.Zero(t, b.depth(b.key("ann")), "it is not taken anew")
	assert.Equal(t, 1, b.depth(b.key("bob")), "and the rest of the call is given back")
	assert.Zero(t, b.depth(b.key("cid")))

	require.ErrorIs(t, outer.Release(ctx), lock.ErrLost)
	again := b.take(outer.Context(ctx), time.Minute, b.key("ann"))
	require.NoError(t, again.Release(ctx), "once released, the owner may start afresh")
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
			lease, _, err := b.TryEach(shared, []string{b.key("ann")}, time.Minute)
			if assert.NoError(t, err) {
				leases[i] = lease
			}
		})
	}
	all.Wait()
	assert.Equal(t, holders+1, b.depth(b.key("ann")))
	for _, lease := range leases {
		all.Go(func() { assert.NoError(t, lease.Release(ctx)) })
	}
	all.Wait()
	assert.Equal(t, 1, b.depth(b.key("ann")))
	require.NoError(t, outer.Release(ctx))
	assert.Zero(t, b.depth(b.key("ann")))
}
