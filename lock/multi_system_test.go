//go:build system

package lock_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

func TestMultiWorksWithoutAMinorityOfServers(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	ns.servers[1].Kill()
	m := ns.multi()
	lease, err := m.Acquire(ctx, "ann")
	require.NoError(t, err)
	assert.Equal(t, 2, ns.held("ann"))
	_, err = ns.try(ns.multi(), "ann")
	require.ErrorIs(t, err, lock.ErrBusy)

	// It restarts without the lock, which does not matter either.
	require.NoError(t, ns.servers[1].Restart(ctx))
	_, err = ns.try(ns.multi(), "ann")
	require.ErrorIs(t, err, lock.ErrBusy)
	require.NoError(t, lease.Err())
	require.NoError(t, lease.Release(ctx))
}

func TestMultiFailsWithoutAMajorityOfServers(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	m := ns.multi()
	ns.servers[0].Kill()
	ns.servers[2].Kill()
	_, err := m.TryAcquire(ctx, "ann")
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrBusy)
	assert.ErrorContains(t, err, "connection refused")
	testkit.Eventually(t, startsWithin, "the release of what was taken", func() bool { return ns.held("ann") == 0 })
}

func TestMultiDoesNotWaitForAHangingServer(t *testing.T) {
	const clientTimeout = time.Minute
	ns := startNodesWith(t, 3, clientTimeout)
	ctx := t.Context()
	m := ns.multi()
	require.NoError(t, syscall.Kill(ns.servers[1].Pid(), syscall.SIGSTOP))
	began := time.Now()
	lease, err := ns.try(m, "ann")
	require.NoError(t, err)
	assert.Less(t, time.Since(began), clientTimeout, "a Multi waits for a second at most")
	require.NoError(t, lease.Release(ctx))

	require.NoError(t, syscall.Kill(ns.servers[1].Pid(), syscall.SIGCONT))
	testkit.Eventually(t, startsWithin, "the release of what the server took late", func() bool {
		return ns.held("ann") == 0
	})
}

func TestMultiReportsTheLossOfTheMajority(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	m := ns.with([]lock.Option{lock.WithLease(6 * time.Second)})
	lease, err := m.Acquire(ctx, "ann")
	require.NoError(t, err)
	inside := lease.Context(ctx)

	require.NoError(t, ns.clients[0].Del(ctx, "ann").Err())
	expiry := func(server int) time.Duration { return ns.clients[server].PExpireTime(ctx, "ann").Val() }
	second, third := expiry(1), expiry(2)
	testkit.Eventually(t, startsWithin, "renewals on two servers", func() bool {
		return expiry(1) > second && expiry(2) > third
	})
	require.NoError(t, inside.Err(), "two of three servers still have it")
	require.NoError(t, lease.Err())

	require.NoError(t, ns.clients[1].Del(ctx, "ann").Err())
	awaitLoss(t, inside, startsWithin)
	require.Equal(t, []string{"ann"}, lostKeys(t, context.Cause(inside)))
	require.Equal(t, []string{"ann"}, lostKeys(t, lease.Err()))
	require.Equal(t, []string{"ann"}, lostKeys(t, lease.Release(ctx)))
	assert.Zero(t, ns.held("ann"))
}

func TestMultiWithAllNeedsEveryServer(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	all := ns.multi(lock.All())
	single := newLocker(t, ns.clients[2])
	lone, err := single.TryAcquire(ctx, "ann")
	require.NoError(t, err)
	_, err = ns.try(all, "ann")
	require.ErrorIs(t, err, lock.ErrBusy)
	testkit.Eventually(t, startsWithin, "the release of the others", func() bool { return ns.held("ann") == 1 })
	majority, err := ns.try(ns.multi(), "ann")
	require.NoError(t, err, "two of three are enough for a majority")
	require.NoError(t, majority.Release(ctx))
	require.NoError(t, lone.Release(ctx))

	ns.servers[0].Kill()
	_, err = all.TryAcquire(ctx, "ann")
	require.Error(t, err)
	require.NotErrorIs(t, err, lock.ErrBusy)
}

func TestMultiDoesNotReenterALostLock(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	ns.servers[2].Kill()
	m := ns.multi()
	outer, err := m.Acquire(ctx, "ann")
	require.NoError(t, err)
	inside := context.WithoutCancel(outer.Context(ctx))
	require.NoError(t, ns.servers[2].Restart(ctx))
	require.NoError(t, ns.clients[1].Del(ctx, "ann").Err())
	between, err := ns.multi().Acquire(ctx, "ann") // on the second and the third server
	require.NoError(t, err)
	_, err = m.TryAcquire(inside, "ann", lock.For(time.Minute)) // this asks Redis and finds the loss
	require.ErrorIs(t, err, lock.ErrLost)
	require.NoError(t, between.Release(ctx))

	_, err = m.TryAcquire(inside, "ann")
	require.Equal(t, []string{"ann"}, lostKeys(t, err), "two servers would grant it, but another owner had it in between")
	require.ErrorIs(t, outer.Release(ctx), lock.ErrLost)
	again, err := m.TryAcquire(inside, "ann")
	require.NoError(t, err, "after its release, the owner may take the lock again")
	require.NoError(t, again.Release(ctx))
}
