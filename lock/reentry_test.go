package lock_test

import (
	"context"
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
