package lock_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
)

// testNodes are independent servers.
type testNodes struct {
	t       *testing.T
	servers []*localserver.Redis
	clients []*redis.Client
}

func startNodes(t *testing.T, n int) testNodes {
	t.Helper()
	return startNodesWith(t, n, time.Second)
}

func startNodesWith(t *testing.T, n int, readTimeout time.Duration) testNodes {
	t.Helper()
	t.Parallel()
	ns := testNodes{t: t, servers: make([]*localserver.Redis, n), clients: make([]*redis.Client, n)}
	var starting sync.WaitGroup
	for i := range n {
		starting.Go(func() {
			server, err := localserver.StartRedis(t.Context(),
				localserver.RedisOptions{Settings: map[string]string{"appendonly": "no"}})
			if assert.NoError(t, err) {
				ns.servers[i] = server
			}
		})
	}
	starting.Wait()
	for i, server := range ns.servers {
		require.NotNil(t, server)
		t.Cleanup(server.Stop)
		options, err := redis.ParseURL(server.URL)
		require.NoError(t, err)
		options.DialerRetries, options.MaxRetries = 1, -1 // no retries against a killed server
		options.ReadTimeout, options.PoolSize = readTimeout, manyDials
		ns.clients[i] = redis.NewClient(options)
		t.Cleanup(func() { _ = ns.clients[i].Close() })
		testkit.Eventually(t, startsWithin, "a connection", func() bool {
			return ns.clients[i].Ping(t.Context()).Err() == nil
		})
	}
	return ns
}

// try is TryAcquireAll on servers that all answer in time.
func (ns testNodes) try(m *lock.Multi, keys ...string) (lease *lock.MultiLease, err error) {
	ns.t.Helper()
	testkit.Eventually(ns.t, startsWithin, "answers in time", func() bool {
		lease, err = m.TryAcquireAll(ns.t.Context(), keys)
		return !errors.Is(err, os.ErrDeadlineExceeded)
	})
	return lease, err
}

// multi is one process: a Locker for each server, and a Multi of them.
func (ns testNodes) multi(opts ...lock.MultiOption) *lock.Multi {
	ns.t.Helper()
	return ns.with(nil, opts...)
}

func (ns testNodes) with(options []lock.Option, opts ...lock.MultiOption) *lock.Multi {
	ns.t.Helper()
	var lockers []*lock.Locker
	for _, client := range ns.clients {
		lockers = append(lockers, newLocker(ns.t, client, options...))
	}
	m, err := lock.NewMulti(lockers, opts...)
	require.NoError(ns.t, err)
	return m
}

// held is the number of running servers on which the lock is held.
func (ns testNodes) held(key string) int {
	ns.t.Helper()
	held := 0
	for i, client := range ns.clients {
		if ns.servers[i].Pid() != 0 {
			held += int(client.Exists(ns.t.Context(), key).Val())
		}
	}
	return held
}

func TestMultiHoldsTheLockOnAllServers(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	first, second := ns.multi(), ns.multi()
	lease, err := ns.try(first, "ann")
	for err == nil && ns.held("ann") < 3 { // one server was late, and released its lock
		require.NoError(t, lease.Release(ctx))
		lease, err = ns.try(first, "ann")
	}
	require.NoError(t, err)
	require.NoError(t, lease.Err())
	assert.Equal(t, 3, ns.held("ann"))

	_, err = ns.try(second, "ann")
	require.ErrorIs(t, err, lock.ErrBusy)
	inside := lease.Context(ctx)
	require.NoError(t, inside.Err())

	require.NoError(t, lease.Release(ctx))
	require.ErrorIs(t, lease.Err(), lock.ErrReleased)
	<-inside.Done()
	require.ErrorIs(t, context.Cause(inside), lock.ErrReleased)
	testkit.Eventually(t, startsWithin, "the release on the last server", func() bool { return ns.held("ann") == 0 })
	other, err := ns.try(second, "ann")
	require.NoError(t, err)
	require.NoError(t, other.Release(ctx))
}

// A lock that another holds on one server costs that server's vote for all keys.
func TestMultiTakesAllKeysOrNone(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	other, err := newLocker(t, ns.clients[2]).TryAcquire(ctx, "bob")
	require.NoError(t, err)
	_, err = ns.try(ns.multi(lock.All()), "ann", "bob")
	require.ErrorIs(t, err, lock.ErrBusy)
	testkit.Eventually(t, startsWithin, "the release of the others", func() bool {
		return ns.held("ann") == 0 && ns.held("bob") == 1
	})

	m := ns.multi()
	lease, err := m.AcquireAll(ctx, []string{"ann", "bob"})
	require.NoError(t, err)
	assert.Equal(t, 2, ns.held("ann"))
	assert.Equal(t, 3, ns.held("bob"))
	more, err := m.AcquireAll(lease.Context(ctx), []string{"bob", "cid"})
	require.NoError(t, err)
	assert.Equal(t, 2, ns.held("cid"), "on the servers where its owner holds the other key")
	require.NoError(t, more.Release(ctx))

	waiting := make(chan error, 1)
	go func() {
		next, err := ns.with([]lock.Option{lock.WithPoll(never)}, lock.All()).AcquireAll(ctx, []string{"bob", "ann"})
		if err == nil {
			err = next.Release(ctx)
		}
		waiting <- err
	}()
	testkit.Eventually(t, startsWithin, "the waiter's subscription", func() bool {
		return len(ns.clients[0].PubSubChannels(ctx, "*bob*").Val()) == 1
	})
	require.NoError(t, lease.Release(ctx))
	require.NoError(t, other.Release(ctx))
	require.NoError(t, await(t, waiting, startsWithin, "all keys on all servers"))
}

func TestMultiReentersWithoutCalls(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	m := ns.multi()
	outer, err := ns.try(m, "ann")
	require.NoError(t, err)
	var asked atomic.Int64
	for _, client := range ns.clients {
		client.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
			asked.Add(1)
			return next(ctx, cmd)
		}))
	}
	inner, err := m.Acquire(outer.Context(ctx), "ann")
	require.NoError(t, err)
	require.NoError(t, inner.Release(ctx))
	assert.Zero(t, asked.Load())
	require.NoError(t, outer.Err())
	require.NoError(t, outer.Release(ctx))
	assert.Positive(t, asked.Load())
}

func TestMultiServesWaitersOneAtATime(t *testing.T) {
	ns := startNodes(t, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	const processes, each, turns = 3, 3, 4
	var inside, done atomic.Int32
	counted := 0 // a data race without the lock
	var all sync.WaitGroup
	for range processes {
		m := ns.multi()
		for range each {
			all.Go(func() {
				for range turns {
					err := m.Do(ctx, "ann", func(context.Context) error {
						if inside.Add(1) != 1 {
							return errors.New("two are inside")
						}
						counted++
						inside.Add(-1)
						return nil
					})
					if !assert.NoError(t, err) {
						return
					}
					done.Add(1)
				}
			})
		}
	}
	all.Wait()
	assert.EqualValues(t, processes*each*turns, done.Load())
	assert.Equal(t, processes*each*turns, counted)
}

func TestMultiWaiterIsWokenByTheRelease(t *testing.T) {
	ns := startNodes(t, 3)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lease, err := ns.multi().Acquire(ctx, "ann", lock.For(10*time.Minute))
	require.NoError(t, err)
	waiting := ns.with([]lock.Option{lock.WithPoll(10 * time.Minute)})
	got := make(chan error, 1)
	go func() {
		second, err := waiting.Acquire(ctx, "ann")
		if err == nil {
			err = second.Release(ctx)
		}
		got <- err
	}()
	testkit.Eventually(t, startsWithin, "the waiter's subscription", func() bool {
		return len(ns.clients[0].PubSubChannels(ctx, "*ann*").Val()) == 1
	})
	require.NoError(t, lease.Release(ctx))
	require.NoError(t, <-got)
}

func TestMultiWaiterReturnsOnDeadline(t *testing.T) {
	ns := startNodes(t, 3)
	lease, err := ns.multi().Acquire(t.Context(), "ann")
	require.NoError(t, err)
	held := ns.held("ann")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = ns.multi().Acquire(ctx, "ann")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, lease.Err())
	assert.Equal(t, held, ns.held("ann"))
}

func TestMultiRejectsInvalidArguments(t *testing.T) {
	_, err := lock.NewMulti(nil)
	require.ErrorIs(t, err, lock.ErrInvalid)
	b := setup(t)
	_, err = lock.NewMulti([]*lock.Locker{b.Locker, b.Locker})
	require.ErrorIs(t, err, lock.ErrInvalid)
	m, err := lock.NewMulti([]*lock.Locker{b.Locker})
	require.NoError(t, err)
	_, err = m.Acquire(t.Context(), b.key("ann"), lock.For(0))
	require.ErrorIs(t, err, lock.ErrInvalid)
}

func TestMultiEndsWithItsLockers(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	var lockers []*lock.Locker
	for _, client := range ns.clients {
		lockers = append(lockers, lock.New(client))
	}
	m, err := lock.NewMulti(lockers)
	require.NoError(t, err)
	lease, err := m.Acquire(ctx, "ann")
	require.NoError(t, err)
	inside := lease.Context(ctx)
	for _, l := range lockers {
		require.NoError(t, l.Close(ctx))
	}
	<-inside.Done()
	require.ErrorIs(t, context.Cause(inside), lock.ErrClosed)
	assert.Zero(t, ns.held("ann"))
	_, err = m.Acquire(ctx, "ann")
	require.ErrorIs(t, err, lock.ErrClosed)
	require.ErrorIs(t, lease.Err(), lock.ErrClosed)
	require.NoError(t, lease.Release(ctx))
}

func TestMultiNamesOnlyTheKeysThatWereLost(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	m := ns.multi(lock.All())
	lease, err := m.AcquireAll(ctx, []string{"ann", "bob"})
	require.NoError(t, err)
	inside := context.WithoutCancel(lease.Context(ctx))
	require.NoError(t, ns.clients[0].Del(ctx, "ann").Err())
	_, err = m.Acquire(inside, "ann", lock.For(lock.MaxLease)) // this asks Redis and finds the loss
	require.Equal(t, []string{"ann"}, lostKeys(t, err))
	require.Equal(t, []string{"ann"}, lostKeys(t, lease.Err()))
	_, err = m.AcquireAll(inside, []string{"bob", "ann", "cid"})
	require.Equal(t, []string{"ann"}, lostKeys(t, err))
	again, err := m.Acquire(inside, "bob")
	require.NoError(t, err)
	require.NoError(t, again.Release(ctx))
	require.Equal(t, []string{"ann"}, lostKeys(t, lease.Release(ctx)))
}

// Each of two locks is on two of three servers, but only one server has both.
func TestMultiReentersLocksOnDifferentServers(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	m := ns.multi()
	for i, key := range map[int]string{0: "bob", 2: "ann"} {
		_, err := newLocker(t, ns.clients[i]).Acquire(ctx, key, lock.For(never))
		require.NoError(t, err)
	}
	ann, err := m.Acquire(ctx, "ann")
	require.NoError(t, err)
	bob, err := m.Acquire(ann.Context(ctx), "bob")
	require.NoError(t, err)
	for i, key := range map[int]string{0: "bob", 2: "ann"} {
		forced, err := newLocker(t, ns.clients[i]).ForceRelease(ctx, key)
		require.NoError(t, err)
		require.True(t, forced)
	}
	both, err := m.AcquireAll(bob.Context(ann.Context(ctx)), []string{"ann", "bob"})
	require.NoError(t, err)
	for _, lease := range []*lock.MultiLease{both, bob, ann} {
		require.NoError(t, lease.Release(ctx))
	}
}

// One server lost one of the locks and does not answer for the other.
func TestMultiReleaseReportsAnErrorBesidesALoss(t *testing.T) {
	ns := startNodes(t, 1)
	ctx := t.Context()
	m := ns.multi()
	outer, err := m.Acquire(ctx, "bob")
	require.NoError(t, err)
	inner, err := m.AcquireAll(outer.Context(ctx), []string{"bob", "cid"})
	require.NoError(t, err)
	require.NoError(t, outer.Release(ctx))
	require.NoError(t, ns.clients[0].Del(ctx, "bob").Err())
	away := errors.New("the server is away")
	c := countCalls(t, ns.clients[0])
	c.answer(func(_ int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if slices.Contains(cmd.Args(), any("cid")) {
			return away
		}
		return next(ctx, cmd)
	})
	err = inner.Release(ctx)
	require.Equal(t, []string{"bob"}, lostKeys(t, err))
	require.ErrorIs(t, err, away)
	c.answer(nil)
	require.NoError(t, inner.Release(ctx), "it continues with the rest")
	assert.Zero(t, ns.held("cid"))
}

func TestMultiWaiterKeepsItsPlace(t *testing.T) {
	ns := startNodes(t, 3)
	ctx := t.Context()
	var lockers []*lock.Locker
	for _, client := range ns.clients {
		lockers = append(lockers, newLocker(t, client, lock.WithPoll(never)))
	}
	m, err := lock.NewMulti(lockers)
	require.NoError(t, err)
	hold := func(server int) {
		_, err := newLocker(t, ns.clients[server]).Acquire(ctx, "ann", lock.For(never))
		require.NoError(t, err)
	}
	hold(1)
	hold(2)
	patient, giveUp := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := m.Acquire(patient, "ann")
		ended <- err
	}()
	testkit.Eventually(t, startsWithin, "a waiter on the second server", func() bool {
		return lockers[1].Waiting("ann") == 1 && lockers[1].MayListen("ann")
	})
	hold(0)
	c := countCalls(t, ns.clients[0])
	for i := range 3 {
		require.NoError(t, ns.clients[1].Publish(ctx, releaseChannel("ann"), "0").Err())
		testkit.Eventually(t, startsWithin, "a further attempt", func() bool { return c.calls(acquireCalls) > i })
	}
	assert.Equal(t, 1, lockers[1].Waiting("ann"))
	assert.Zero(t, lockers[0].Waiting("ann"))
	giveUp()
	require.ErrorIs(t, await(t, ended, startsWithin, "the end of the wait"), context.Canceled)
	assert.Zero(t, lockers[1].Waiting("ann"))
}
