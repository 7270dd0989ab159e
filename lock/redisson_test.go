//go:build redisson

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

const (
	// patience bounds each wait of these tests.
	patience = 20 * time.Second
	// beyond is longer than a test waits: a lock with this lease does not end, and a waiter with
	// this poll does not ask by itself, so a release has woken it.
	beyond = 3 * patience
	// shortLease is renewed every third of it. Its holder may be stopped by a busy machine for two
	// thirds of it.
	shortLease = 2 * time.Second
)

// nameShapes are the forms of a name that Redisson's rule for channels distinguishes.
var nameShapes = map[string]string{
	"plain":             "ann",
	"with a hash tag":   "{0}:lock:ann",
	"with only a brace": "ann{",
}

func TestRedissonAndGoCountTogether(t *testing.T) {
	t.Parallel()
	java := startRedisson(t, beyond)
	for shape, name := range nameShapes {
		t.Run(shape, func(t *testing.T) {
			in := setupInterop(t, lock.WithPoll(beyond))
			key, counter := in.key(name), in.key("counter")
			const threads, times = 3, 30
			var answers []<-chan string
			for i := range threads {
				answers = append(answers, java.tell(fmt.Sprintf("%s/%d", key, i), "count %s %s %d", key, counter, times))
			}
			testkit.Eventually(t, patience, "a count of Redisson", func() bool {
				return in.rdb.Exists(in.ctx, counter).Val() == 1
			})

			// Go counts as long as Redisson does, so that they take turns.
			var mine turns
			var goroutines sync.WaitGroup
			counted := make(chan struct{})
			for range threads {
				goroutines.Go(func() {
					for {
						select {
						case <-counted:
							return
						default:
						}
						if !assert.NoError(t, in.count(key, counter, &mine)) {
							return
						}
					}
				})
			}
			for _, answer := range answers {
				assert.Equal(t, "counted "+strconv.Itoa(times), java.wait(t, answer))
			}
			close(counted)
			goroutines.Wait()

			total, err := in.rdb.Get(in.ctx, counter).Int()
			require.NoError(t, err)
			assert.Equal(t, threads*times+mine.counts, total)
			assert.Greater(t, mine.handOvers, threads, "the lock passed from one side to the other and back")
		})
	}
}

// turns is what the Go side did with the counter.
type turns struct {
	mu                      sync.Mutex
	counts, last, handOvers int
}

func (t *turns) note(value int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if value != t.last {
		t.handOvers++
	}
	t.counts++
	t.last = value + 1
}

// count is GET, add one, SET: a count by another holder between these would be lost.
func (in interop) count(key, counter string, mine *turns) error {
	return in.locker.Do(in.ctx, key, func(ctx context.Context) error {
		value, err := in.rdb.Get(ctx, counter).Int()
		if err != nil {
			return err
		}
		mine.note(value)
		return in.rdb.Set(ctx, counter, value+1, 0).Err()
	})
}

func TestRedissonAndGoExcludeAndWakeEachOther(t *testing.T) {
	t.Parallel()
	java := startRedisson(t, beyond)
	for shape, name := range nameShapes {
		t.Run("Redisson wakes Go, "+shape, func(t *testing.T) {
			in := setupInterop(t, lock.WithPoll(beyond))
			key := in.key(name)
			require.Equal(t, "held", java.ask(t, key, "lock %s", key))
			acquired := in.acquire(key)
			in.waitAsleep(key)
			require.Equal(t, "released", java.ask(t, key, "unlock %s", key))
			in.release(<-acquired)
		})
		t.Run("Go wakes Redisson, "+shape, func(t *testing.T) {
			in := setupInterop(t)
			key := in.key(name)
			lease, err := in.locker.Acquire(in.ctx, key, lock.For(beyond))
			require.NoError(t, err)
			answer := java.tell(key, "lock %s", key)
			java.waitAsleep(t, key)
			require.NoError(t, lease.Release(in.ctx))
			require.Equal(t, "held", java.wait(t, answer))
			require.Equal(t, "released", java.ask(t, key, "unlock %s", key))
		})
	}

	t.Run("a lock that Redisson reentered is free after the last unlock", func(t *testing.T) {
		in := setupInterop(t, lock.WithPoll(beyond))
		key := in.key("ann")
		for range 2 {
			require.Equal(t, "held", java.ask(t, key, "lock %s", key))
		}
		holding, err := in.locker.Look(in.ctx, key)
		require.NoError(t, err)
		assert.Equal(t, 2, holding.Depth, "it counts in Redis")
		assert.Equal(t, in.rdb.HKeys(in.ctx, key).Val(), []string{holding.Owner})
		assert.Positive(t, holding.Left)
		assert.False(t, holding.Mine)
		require.Equal(t, "released", java.ask(t, key, "unlock %s", key))
		_, err = in.locker.TryAcquire(in.ctx, key)
		require.ErrorIs(t, err, lock.ErrBusy)
		require.Equal(t, "released", java.ask(t, key, "unlock %s", key))
		lease, err := in.locker.TryAcquire(in.ctx, key)
		require.NoError(t, err)
		require.NoError(t, lease.Release(in.ctx))
	})

	t.Run("many keys, one of them held by Redisson", func(t *testing.T) {
		in := setupInterop(t, lock.WithPoll(beyond))
		ann, bob := in.key("ann"), in.key("bob")
		require.Equal(t, "held", java.ask(t, bob, "lock %s", bob))

		lease, busy, err := in.locker.TryEach(in.ctx, []string{ann, bob})
		require.NoError(t, err)
		assert.Equal(t, []string{ann}, lease.Keys())
		assert.Equal(t, []string{bob}, busy)
		require.Equal(t, "busy", java.ask(t, ann, "trylock %s 0 -1", ann))
		require.NoError(t, lease.Release(in.ctx))

		in.inVain.Store(0)
		all := in.acquire(ann, bob)
		in.waitAsleep(bob)
		require.Equal(t, "held", java.ask(t, ann, "trylock %s 0 -1", ann), "a waiting AcquireAll holds none")
		require.Equal(t, "released", java.ask(t, bob, "unlock %s", bob))
		require.Equal(t, "released", java.ask(t, ann, "unlock %s", ann))
		in.release(<-all)
	})
}

func TestRedissonAndGoForceEachOthersLocks(t *testing.T) {
	t.Parallel()
	java := startRedisson(t, shortLease)

	t.Run("from Redisson", func(t *testing.T) {
		in := setupInterop(t)
		key := in.key("ann")
		held, err := in.locker.ForceRelease(in.ctx, key)
		require.NoError(t, err)
		require.False(t, held)

		require.Equal(t, "held", java.ask(t, "victim", "lock %s %d", key, beyond.Milliseconds()))
		waiter := java.tell("waiter", "lock %s %d", key, beyond.Milliseconds())
		java.waitAsleep(t, "waiter")
		held, err = in.locker.ForceRelease(in.ctx, key)
		require.NoError(t, err)
		assert.True(t, held)
		require.Equal(t, "held", java.wait(t, waiter))
		assert.Contains(t, java.ask(t, "victim", "unlock %s", key), "IllegalMonitorStateException")
		require.Equal(t, "released", java.ask(t, "waiter", "unlock %s", key), "the victim's unlock leaves the lock alone")
	})

	t.Run("from Go", func(t *testing.T) {
		in := setupInterop(t, lock.WithLease(shortLease))
		key := in.key("ann")
		lease, err := in.locker.Acquire(in.ctx, key)
		require.NoError(t, err)
		ctx := lease.Context(in.ctx)
		require.Equal(t, "released", java.ask(t, "thief", "force %s", key))
		require.Equal(t, "held", java.ask(t, "thief", "trylock %s 0 -1", key))
		<-ctx.Done()
		require.ErrorIs(t, context.Cause(ctx), lock.ErrLost)
		require.ErrorIs(t, lease.Release(in.ctx), lock.ErrLost)
		require.Equal(t, "released", java.ask(t, "thief", "unlock %s", key), "the victim's release leaves the lock alone")
	})
}

func TestRedissonAndGoRenewAgainstEachOther(t *testing.T) {
	t.Parallel()
	java := startRedisson(t, shortLease)

	t.Run("Redisson's", func(t *testing.T) {
		t.Parallel()
		in := setupInterop(t, lock.WithPoll(beyond))
		key := in.key("ann")
		require.Equal(t, "held", java.ask(t, "keeper", "lock %s", key))
		acquired := in.acquire(key)
		in.waitAsleep(key)
		in.waitLeases(key, 2)
		assert.Empty(t, acquired)
		require.Equal(t, "released", java.ask(t, "keeper", "unlock %s", key))
		in.release(<-acquired)
	})

	t.Run("Go's", func(t *testing.T) {
		t.Parallel()
		in := setupInterop(t, lock.WithLease(shortLease))
		key := in.key("bob")
		lease, err := in.locker.Acquire(in.ctx, key)
		require.NoError(t, err)
		answer := java.tell("waiter", "lock %s", key)
		java.waitAsleep(t, "waiter")
		in.waitLeases(key, 2)
		assert.Empty(t, answer)
		require.NoError(t, lease.Release(in.ctx))
		require.Equal(t, "held", java.wait(t, answer))
		require.Equal(t, "released", java.ask(t, "waiter", "unlock %s", key))
	})
}

func TestGoTakesOverFromAKilledRedissonWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	in := setupInterop(t, lock.WithPoll(beyond))
	java := startRedisson(t, shortLease)
	key := in.key("ann")
	require.Equal(t, "held", java.ask(t, "victim", "lock %s", key))
	acquired := in.acquire(key)
	in.waitAsleep(key)
	in.waitLeases(key, 1)

	java.kill()
	ends := in.leaseLeft(key)
	require.Empty(t, acquired)
	lease := <-acquired
	in.assertTakenOverAt(ends)
	in.release(lease)
}

func TestRedissonTakesOverFromAKilledGoWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	in := setupInterop(t)
	java := startRedisson(t, shortLease)
	key := in.key("ann")
	victim := testkit.Command(t, "hold", key)
	victim.Setenv("REDIS_URL", testkit.RedisURL(t))
	victim.Setenv("LOCK_LEASE", shortLease.String())
	victim.Start()
	victim.WaitOutput(patience, "held token=")
	answer := java.tell("heir", "lock %s", key)
	java.waitAsleep(t, "heir")
	in.waitLeases(key, 1)

	victim.Kill()
	ends := in.leaseLeft(key)
	require.Empty(t, answer)
	require.Equal(t, "held", java.wait(t, answer))
	in.assertTakenOverAt(ends)
	require.Equal(t, "released", java.ask(t, "heir", "unlock %s", key))
}

// In a Redis Cluster, a current Redisson publishes releases to sharded channels, which ordinary
// subscriptions do not receive. An old one uses ordinary channels there, so that neither side wakes the
// other: Go finds the lock by its poll.
func TestRedissonAndGoExcludeEachOtherInACluster(t *testing.T) {
	if isOldRedisson() {
		excludeInCluster(t)
	} else {
		wakeInCluster(t)
	}
}

func excludeInCluster(t *testing.T) {
	t.Helper()
	rdb := startCluster(t, 3)
	java := startRedisson(t, beyond, "--cluster", "redis://"+rdb.Options().Addrs[0])
	in := interopIn(t, rdb, "test", lock.WithPoll(100*time.Millisecond))
	require.Equal(t, "held", java.ask(t, "ann", "lock ann"))
	acquired := in.acquire("ann")
	in.waitAsleep("ann")
	require.Equal(t, "released", java.ask(t, "ann", "unlock ann"))
	lease := <-acquired
	require.Equal(t, "busy", java.ask(t, "ann", "trylock ann 0 -1"))
	in.release(lease)
	require.Equal(t, "held", java.ask(t, "ann", "trylock ann 0 -1"))
	require.Equal(t, "released", java.ask(t, "ann", "unlock ann"))
}

func wakeInCluster(t *testing.T) {
	t.Helper()
	rdb := startCluster(t, 3)
	java := startRedisson(t, beyond, "--cluster", "redis://"+rdb.Options().Addrs[0])
	for shape, key := range map[string]string{"plain": "ann", "with a hash tag": "{0}:lock:ann"} {
		t.Run(shape, func(t *testing.T) {
			in := interopIn(t, rdb, "test", lock.WithPoll(beyond))
			require.Equal(t, "held", java.ask(t, key, "lock %s", key))
			acquired := in.acquire(key)
			in.waitAsleep(key)
			require.Equal(t, "released", java.ask(t, key, "unlock %s", key))
			lease := <-acquired

			answer := java.tell(key, "lock %s", key)
			java.waitAsleep(t, key)
			in.release(lease)
			require.Equal(t, "held", java.wait(t, answer))

			waiter := java.tell("waiter", "lock %s", key)
			java.waitAsleep(t, "waiter")
			_, err := in.locker.ForceRelease(in.ctx, key)
			require.NoError(t, err)
			require.Equal(t, "held", java.wait(t, waiter))
			require.Equal(t, "released", java.ask(t, "waiter", "unlock %s", key))
		})
	}
}

// Redisson's multi lock of two keys on three servers is free when both are free on all servers.
func TestRedissonMultiLockAndMultiExcludeEachOther(t *testing.T) {
	ns := startNodes(t, 3)
	var urls []string
	for _, server := range ns.servers {
		urls = append(urls, server.URL)
	}
	java := startRedisson(t, beyond, strings.Join(urls, ","))
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	keys := []string{"ann", "bob"}
	m := ns.with([]lock.Option{lock.WithPoll(beyond)}, lock.All())

	lease, err := m.AcquireAll(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, "busy", java.ask(t, "java", "trylock ann+bob 0 -1"))
	require.NoError(t, lease.Err(), "Redisson has released only what it took")
	answer := java.tell("java", "lock ann+bob")
	java.waitAsleep(t, "java")
	require.NoError(t, lease.Release(ctx))
	require.Equal(t, "held", java.wait(t, answer))

	_, err = m.TryAcquireAll(ctx, keys)
	require.ErrorIs(t, err, lock.ErrBusy)
	_, err = ns.multi().TryAcquire(ctx, "bob")
	require.ErrorIs(t, err, lock.ErrBusy, "no server is free")
	waiting := make(chan *lock.MultiLease, 1)
	go func() {
		got, err := m.AcquireAll(ctx, keys)
		assert.NoError(t, err)
		waiting <- got
	}()
	testkit.Eventually(t, patience, "a subscription", func() bool {
		return ns.clients[0].PubSubNumSub(ctx, releaseChannel("ann")).Val()[releaseChannel("ann")] == 1
	})
	require.Equal(t, "released", java.ask(t, "java", "unlock ann+bob"))
	lease = <-waiting
	require.NotNil(t, lease)
	require.NoError(t, lease.Release(ctx))

	// One of the keys on one of the servers is enough.
	require.Equal(t, "held", java.ask(t, "java", "lock bob"))
	_, err = m.TryAcquireAll(ctx, keys)
	require.ErrorIs(t, err, lock.ErrBusy)
	testkit.Eventually(t, patience, "the release of the others", func() bool {
		return ns.held("ann") == 0 && ns.held("bob") == 1
	})
	require.Equal(t, "released", java.ask(t, "java", "unlock bob"))
}

// interop belongs to one test.
type interop struct {
	t      *testing.T
	ctx    context.Context
	rdb    redis.UniversalClient
	locker *lock.Locker
	// inVain counts the busy answers of the locker.
	inVain *atomic.Int64
	key    func(name string) string
}

func setupInterop(t *testing.T, opts ...lock.Option) interop {
	t.Helper()
	return interopIn(t, testkit.Redis(t), testkit.Keys(t).Prefix, opts...)
}

func interopIn(t *testing.T, rdb redis.UniversalClient, prefix string, opts ...lock.Option) interop {
	t.Helper()
	in := interop{t: t, rdb: rdb, inVain: new(atomic.Int64), key: func(name string) string { return prefix + ":" + name }}
	var cancel context.CancelFunc
	in.ctx, cancel = context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	busy := lock.Observer{Busy: func(locks int) { in.inVain.Add(int64(locks)) }}
	in.locker = lock.New(in.rdb, append(opts, lock.WithPrefix(prefix), lock.WithObserver(busy))...)
	t.Cleanup(func() { assert.NoError(t, in.locker.Close(context.WithoutCancel(in.ctx))) })
	return in
}

// acquire waits for the locks of all keys in a goroutine that ends with the test. On an error the
// test fails and the channel is closed.
func (in interop) acquire(keys ...string) <-chan *lock.Lease {
	acquired := make(chan *lock.Lease, 1)
	ended := make(chan struct{})
	in.t.Cleanup(func() { <-ended })
	go func() {
		defer close(ended)
		defer close(acquired)
		lease, err := in.locker.AcquireAll(in.ctx, keys)
		if assert.NoError(in.t, err) {
			acquired <- lease
		}
	}()
	return acquired
}

// release takes the result of acquire.
func (in interop) release(lease *lock.Lease) {
	in.t.Helper()
	require.NotNil(in.t, lease, "the lock was not acquired")
	require.NoError(in.t, lease.Release(in.ctx))
}

// waitAsleep waits until an acquire has a busy answer, has subscribed to the channel of the lock,
// and has another busy answer: if it gets the lock later, a message has woken it.
func (in interop) waitAsleep(key string) {
	in.t.Helper()
	channel := releaseChannel(key)
	testkit.Eventually(in.t, patience, "a subscription to "+channel, func() bool { return in.subscribers(channel) == 1 })
	testkit.Eventually(in.t, patience, "a second attempt", func() bool { return in.inVain.Load() >= 2 })
}

func (in interop) subscribers(channel string) int64 {
	cluster, clustered := in.rdb.(*redis.ClusterClient)
	if !clustered {
		return in.rdb.PubSubNumSub(in.ctx, channel).Val()[channel]
	}
	var all atomic.Int64 // the nodes are asked in parallel
	require.NoError(in.t, cluster.ForEachMaster(in.ctx, func(ctx context.Context, node *redis.Client) error {
		here, err := node.PubSubShardNumSub(ctx, channel).Result()
		all.Add(here[channel])
		return err
	}))
	return all.Load()
}

// waitLeases waits until renewals have extended a lock by so many short leases.
func (in interop) waitLeases(key string, leases time.Duration) {
	in.t.Helper()
	until := in.expiry(key) + (leases * shortLease).Milliseconds()
	testkit.Eventually(in.t, patience, "renewals of "+key, func() bool { return in.expiry(key) >= until })
}

// expiry is when the lock ends, in milliseconds of Redis's clock. It fails the test if the lock is
// free.
func (in interop) expiry(key string) int64 {
	in.t.Helper()
	at, err := in.rdb.PExpireTime(in.ctx, key).Result()
	require.NoError(in.t, err)
	require.Positive(in.t, at, "the lock is held")
	return at.Milliseconds()
}

// leaseLeft is when the lock of a dead holder ends: within a short lease.
func (in interop) leaseLeft(key string) (ends int64) {
	in.t.Helper()
	ends = in.expiry(key)
	assert.LessOrEqual(in.t, ends, in.now()+shortLease.Milliseconds())
	return ends
}

// assertTakenOverAt is called when the successor has the lock. It reads the clock by which Redis
// ends leases, so a successor is never early.
func (in interop) assertTakenOverAt(ends int64) {
	in.t.Helper()
	now := in.now()
	assert.Greater(in.t, now, ends)
	assert.Less(in.t, now, ends+shortLease.Milliseconds(), "the successor needs no message")
}

// now is Redis's clock in milliseconds.
func (in interop) now() int64 {
	in.t.Helper()
	now, err := in.rdb.Time(in.ctx).Result()
	require.NoError(in.t, err)
	return now.UnixMilli()
}
