//go:build system

package lock_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
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

// unreliableNet forwards what clients send to Redis. It loses the answers of some script calls, and
// delivers some late, after their client has given them up, or twice. Each call arrives in the end.
type unreliableNet struct {
	t    *testing.T
	addr string

	mu                   sync.Mutex
	random               *mathrand.Rand
	late                 sync.WaitGroup
	disturbed, delivered atomic.Int64 // calls
}

func (n *unreliableNet) client() *redis.Client {
	client := redis.NewClient(&redis.Options{
		Dialer: func(ctx context.Context, network, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, n.addr)
			return &unreliableConn{Conn: conn, net: n}, err
		},
		ReadTimeout: unreliableTimeout, MaxRetries: 2, MinRetryBackoff: -1,
	})
	n.t.Cleanup(func() { _ = client.Close() })
	return client
}

// unreliableTimeout is the clients' timeout for an attempt.
const unreliableTimeout = 60 * time.Millisecond

type unreliableConn struct {
	net.Conn
	net  *unreliableNet
	deaf atomic.Bool // discards the answers of Redis
}

// Write implements io.Writer.
func (c *unreliableConn) Write(p []byte) (int, error) {
	if !bytes.Contains(p, []byte("evalsha")) {
		return c.Conn.Write(p)
	}
	n := c.net
	n.mu.Lock()
	chance, delay := n.random.IntN(100), time.Duration(n.random.Int64N(int64(8*unreliableTimeout)))
	n.mu.Unlock()
	switch {
	case chance < 15:
		n.deliverLate(p, delay)
		return len(p), nil
	case chance < 30:
		n.disturbed.Add(1)
		c.deaf.Store(true)
	case chance < 40:
		n.deliverLate(p, delay)
	}
	return c.Conn.Write(p)
}

// Read implements io.Reader.
func (c *unreliableConn) Read(p []byte) (int, error) {
	for {
		read, err := c.Conn.Read(p)
		if err != nil || !c.deaf.Load() {
			return read, err
		}
	}
}

func (n *unreliableNet) deliverLate(call []byte, delay time.Duration) {
	n.disturbed.Add(1)
	call = bytes.Clone(call)
	n.late.Go(func() {
		<-time.After(delay)
		conn, err := net.Dial("tcp", n.addr)
		if !assert.NoError(n.t, err) {
			return
		}
		defer func() { assert.NoError(n.t, conn.Close()) }()
		assert.NoError(n.t, conn.SetDeadline(time.Now().Add(startsWithin)))
		_, err = conn.Write(call)
		assert.NoError(n.t, err)
		_, err = conn.Read(make([]byte, 1<<10))
		assert.NoError(n.t, err)
		n.delivered.Add(1)
	})
}

// The leases outlast the test, so no lock may be lost: each holder is alone until its release, no
// release reports a loss, and no lock is left in the end.
func TestUnreliableNetworkLosesNoLock(t *testing.T) {
	b := setup(t)
	seed := mathrand.Uint64()
	t.Logf("seed=%d", seed)
	n := &unreliableNet{t: t, addr: b.rdb.Options().Addr, random: mathrand.New(mathrand.NewPCG(seed, 0))}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	const clients, turns = 8, 25
	names := b.names(3)
	inside := make([]atomic.Int32, len(names))
	prefix := b.key(rand.Text())
	lockers := []*lock.Locker{
		newLocker(t, n.client(), lock.WithPrefix(prefix)),
		newLocker(t, n.client(), lock.WithPrefix(prefix)),
	}
	var got, gaveUp, again atomic.Int64

	var all sync.WaitGroup
	for client := range clients {
		random := mathrand.New(mathrand.NewPCG(seed, uint64(client)+1))
		l := lockers[client%len(lockers)]
		all.Go(func() {
			for range turns {
				one, two := random.IntN(len(names)), random.IntN(len(names))
				var lease *lock.Lease
				var err error
				switch random.IntN(4) {
				case 0:
					lease, err = l.Acquire(ctx, names[one])
				case 1:
					lease, err = l.AcquireAll(ctx, []string{names[one], names[two]}, lock.For(time.Minute))
				case 2:
					lease, err = l.TryAcquire(ctx, names[one])
				default:
					lease, _, err = l.TryEach(ctx, []string{names[one], names[two]}, lock.For(time.Minute))
				}
				switch {
				case errors.Is(err, lock.ErrBusy):
					continue
				case errors.Is(err, os.ErrDeadlineExceeded):
					gaveUp.Add(1)
					continue
				case !assert.NoError(t, err):
					return
				}
				for i, name := range names {
					if lease.Holds(name) {
						got.Add(1)
						assert.EqualValues(t, 1, inside[i].Add(1), "two holders of %s", name)
					}
				}
				assert.NoError(t, lease.Err())
				for i, name := range names {
					if lease.Holds(name) {
						inside[i].Add(-1)
					}
				}
				for err = lease.Release(ctx); errors.Is(err, os.ErrDeadlineExceeded); err = lease.Release(ctx) {
					again.Add(1)
				}
				if !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	all.Wait()
	n.late.Wait()
	t.Logf("%d locks taken, %d calls disturbed, %d acquires given up, %d releases repeated", got.Load(),
		n.disturbed.Load(), gaveUp.Load(), again.Load())
	assert.Positive(t, n.delivered.Load())
	for _, name := range names {
		require.Zero(t, b.depth(name), "a lock is left behind: %s", name)
	}
}
