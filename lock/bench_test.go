package lock_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/lock"
	"stampede/lua"
)

func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(command), testkit.WithRedisInMemory())
}

// command is a process that holds a lock:
//
//	hold KEY
//
// It waits for the lock of KEY in the Redis of REDIS_URL, prints "held token=N", and answers the
// commands on its standard input with the error of the lease (look) or of its release (release).
// The watchdog renews the lease, of LOCK_LEASE or 30s.
// When the lease ends, it prints "ended: " and the cause of its context. It does not end with its
// standard input but by a signal, and releases nothing then.
func command() int {
	if len(os.Args) != 3 || os.Args[1] != "hold" {
		fmt.Fprintln(os.Stderr, "usage: hold KEY")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runHolder(ctx, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runHolder(ctx context.Context, key string) error {
	options, err := redis.ParseURL(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	var opts []lock.Option
	if length := os.Getenv("LOCK_LEASE"); length != "" {
		d, err := time.ParseDuration(length)
		if err != nil {
			return err
		}
		opts = append(opts, lock.WithLease(d))
	}
	lease, err := lock.New(redis.NewClient(options), opts...).Acquire(ctx, key)
	if err != nil {
		return err
	}
	held := lease.Context(ctx)
	context.AfterFunc(held, func() { fmt.Println("ended:", context.Cause(held)) })
	fmt.Printf("held token=%d\n", lease.Token(key))
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		err := lease.Err()
		if lines.Text() == "release" {
			err = lease.Release(ctx)
		}
		fmt.Printf("%s: %v\n", lines.Text(), err)
	}
	<-ctx.Done()
	return nil
}

// startCluster returns a client of a Redis Cluster of n nodes without replicas.
func startCluster(t *testing.T, n int) *redis.ClusterClient {
	t.Helper()
	t.Parallel()
	cluster, err := localserver.StartCluster(t.Context(), localserver.ClusterOptions{Masters: n})
	require.NoError(t, err)
	t.Cleanup(cluster.Stop)
	addrs := make([]string, n)
	for i, node := range cluster.Nodes {
		addrs[i] = node.Addr()
	}
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

const (
	// startsWithin bounds the start of a process, and all waits for something that happens soon.
	startsWithin = 30 * time.Second
	// never is a poll that does not happen during a test.
	never = 10 * time.Minute
)

// bench is a Locker for one test, with its Redis and its own key names.
type bench struct {
	*lock.Locker
	t   *testing.T
	rdb *redis.Client
	key func(name string) string
}

func setup(t *testing.T) bench {
	t.Helper()
	t.Parallel()
	return setupOn(t, testkit.Redis(t).(*redis.Client))
}

func setupOn(t *testing.T, rdb *redis.Client) bench {
	t.Helper()
	keys := testkit.Keys(t)
	return bench{newLocker(t, rdb), t, rdb, func(name string) string { return keys.Lock(0, name) }}
}

// locker returns a Locker that is closed when the test ends.
func newLocker(t testing.TB, rdb redis.UniversalClient, opts ...lock.Option) *lock.Locker {
	t.Helper()
	l := lock.New(rdb, opts...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = l.Close(ctx) // some tests leave lost leases or a stopped Redis
	})
	return l
}

func (b bench) names(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = b.key(strconv.Itoa(i))
	}
	return names
}

// bare is a key without braces.
func (b bench) bare(name string) string {
	return strings.NewReplacer("{", "", "}", "").Replace(b.key(name))
}

// take takes free keys with TryEach.
func (b bench) take(ctx context.Context, lease time.Duration, keys ...string) *lock.Lease {
	b.t.Helper()
	got, busy, err := b.TryEach(ctx, keys, lock.For(lease))
	require.NoError(b.t, err)
	require.Empty(b.t, busy)
	return got
}

// depth is the depth of a lock in Redis, 0 if it is free.
func (b bench) depth(key string) int {
	b.t.Helper()
	fields, err := b.rdb.HGetAll(b.t.Context(), key).Result()
	require.NoError(b.t, err)
	require.LessOrEqual(b.t, len(fields), 1, "a lock has one owner")
	for _, depth := range fields {
		n, err := strconv.Atoi(depth)
		require.NoError(b.t, err)
		return n
	}
	return 0
}

// manyDials is the pool size for a server that is stopped and restarted: after as many failed dials
// as the pool has places, go-redis answers with the last error for up to a second.
const manyDials = 10_000

// ownServer returns a bench with its own Redis, to be killed, frozen and restarted.
func ownServer(t *testing.T) (*localserver.Redis, bench) {
	t.Helper()
	t.Parallel()
	server := testkit.OwnRedis(t)
	return server, benchOn(t, server)
}

// forgetfulServer is ownServer with a Redis that writes nothing to disk.
func forgetfulServer(t *testing.T) (*localserver.Redis, bench) {
	t.Helper()
	t.Parallel()
	server, err := localserver.StartRedis(t.Context(),
		localserver.RedisOptions{Settings: map[string]string{"appendonly": "no"}})
	require.NoError(t, err)
	t.Cleanup(server.Stop)
	return server, benchOn(t, server)
}

func benchOn(t *testing.T, server *localserver.Redis) bench {
	t.Helper()
	options, err := redis.ParseURL(server.URL)
	require.NoError(t, err)
	options.DialerRetries = 1 // no retries against a killed server
	options.PoolSize = manyDials
	rdb := redis.NewClient(options)
	t.Cleanup(func() { _ = rdb.Close() })
	return bench{newLocker(t, rdb), t, rdb, func(name string) string { return "lock:" + name }}
}

// setupWaiting returns a bench whose Locker learns of a release by its message only, and a lease of
// another process on some keys.
func setupWaiting(t *testing.T, keys ...string) (bench, *lock.Lease) {
	t.Helper()
	b := setup(t)
	b.Locker = newLocker(t, b.rdb, lock.WithPoll(never))
	for i, key := range keys {
		keys[i] = b.key(key)
	}
	holder, err := newLocker(t, b.rdb).AcquireAll(t.Context(), keys, lock.For(never))
	require.NoError(t, err)
	return b, holder
}

// waitQueued waits for so many waiters for a key, and for the listener.
func (b bench) waitQueued(key string, waiters int) {
	b.t.Helper()
	testkit.Eventually(b.t, startsWithin, fmt.Sprintf("%d waiters for %s", waiters, key), func() bool {
		return b.Waiting(key) == waiters
	})
	b.waitListening(key, 1)
}

// waitCalls waits for so many attempts.
func (b bench) waitCalls(c *callCounter, asked int) {
	b.t.Helper()
	testkit.Eventually(b.t, startsWithin, fmt.Sprintf("%d calls to acquire", asked), func() bool {
		return c.calls(acquireCalls) >= asked
	})
	require.Equal(b.t, asked, c.calls(acquireCalls))
}

// acquiring runs Acquire in a goroutine that ends with the test. The test fails if it gets no
// lease.
func acquiring(t *testing.T, l *lock.Locker, key string, opts ...lock.AcquireOption) <-chan *lock.Lease {
	t.Helper()
	return acquiringIn(t.Context(), t, l, []string{key}, opts...)
}

func acquiringIn(
	ctx context.Context, t *testing.T, l *lock.Locker, keys []string, opts ...lock.AcquireOption,
) <-chan *lock.Lease {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	leases := make(chan *lock.Lease, 1)
	ended := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	go func() {
		defer close(ended)
		defer close(leases)
		if lease, err := l.AcquireAll(ctx, keys, opts...); ctx.Err() == nil && assert.NoError(t, err) {
			leases <- lease
		}
	}()
	return leases
}

// await fails the test if the channel is closed or delivers nothing in time.
func await[T any](t *testing.T, from <-chan T, within time.Duration, what string) T {
	t.Helper()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case got, open := <-from:
		require.True(t, open, what)
		return got
	case <-timer.C:
		t.Fatalf("not within %v: %s", within, what)
	}
	panic("unreachable")
}

// awaitLoss waits until the holder learns of the loss, and returns the time.
func awaitLoss(t *testing.T, held context.Context, within time.Duration) time.Time {
	t.Helper()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-held.Done():
		require.ErrorIs(t, context.Cause(held), lock.ErrLost)
	case <-timer.C:
		t.Fatalf("not within %v: the loss is reported", within)
	}
	return time.Now()
}

// releaseChannel is the name that Redisson gives to the channel of a lock, so it is written out here.
func releaseChannel(key string) string {
	if strings.Contains(key, "{") {
		return "redisson_lock__channel:" + key
	}
	return "redisson_lock__channel:{" + key + "}"
}

// waitListening waits until so many Lockers listen for the release of a lock.
func (b bench) waitListening(key string, listeners int64) {
	b.t.Helper()
	channel := releaseChannel(key)
	testkit.Eventually(b.t, startsWithin, "a listener on "+channel, func() bool {
		return b.rdb.PubSubNumSub(b.t.Context(), channel).Val()[channel] == listeners
	})
}

// expiry is when a lock ends by Redis's clock.
func (b bench) expiry(key string) time.Time {
	b.t.Helper()
	at, err := b.rdb.PExpireTime(b.t.Context(), key).Result()
	require.NoError(b.t, err)
	require.Positive(b.t, at, "the lock is held and has an expiry")
	return time.UnixMilli(at.Milliseconds())
}

// waitRenewed waits until a lock ends later than the given time.
func (b bench) waitRenewed(key string, than time.Time) {
	b.t.Helper()
	testkit.Eventually(b.t, startsWithin, "a renewal of "+key, func() bool { return b.expiry(key).After(than) })
}

// now is Redis's clock.
func (b bench) now() time.Time {
	b.t.Helper()
	now, err := b.rdb.Time(b.t.Context()).Result()
	require.NoError(b.t, err)
	return now
}

// Kinds of calls to Redis.
const (
	acquireCalls = iota
	releaseCalls
	renewalCalls
	forceCalls
	otherCalls
)

// callCounter counts the answered calls of one client, and can replace Redis.
type callCounter struct {
	hashes []string // of the scripts

	mu    sync.Mutex
	count [otherCalls + 1]int
	// sizes are the numbers of keys of each renewal.
	sizes []int
	// instead replaces Redis for each command, if it is set.
	instead func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error
}

// countCalls counts from now on. It does not count go-redis's retries, and loads the scripts so
// that none is sent twice.
func countCalls(t *testing.T, rdb *redis.Client) *callCounter {
	t.Helper()
	c := &callCounter{}
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease, lua.LockRenew, lua.LockForce} {
		hash, err := script.Load(t.Context(), rdb).Result()
		require.NoError(t, err)
		c.hashes = append(c.hashes, hash)
	}
	rdb.AddHook(testkit.Hook(c.process))
	return c
}

func (c *callCounter) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	kind := otherCalls
	if args := cmd.Args(); len(args) > 2 && args[0] == "evalsha" {
		kind = slices.Index(c.hashes, args[1].(string))
	}
	c.mu.Lock()
	instead := c.instead
	c.mu.Unlock()
	var err error
	if instead != nil {
		err = instead(kind, next, ctx, cmd)
	} else {
		err = next(ctx, cmd)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[kind]++
	if kind == renewalCalls {
		c.sizes = append(c.sizes, cmd.Args()[2].(int))
	}
	return err
}

// answer makes f answer each command; nil restores Redis.
func (c *callCounter) answer(f func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.instead = f
}

func (c *callCounter) calls(kind int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count[kind]
}

func (c *callCounter) all() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := 0
	for _, n := range c.count {
		sum += n
	}
	return sum
}

// renewedKeys returns the number of keys of each renewal.
func (c *callCounter) renewedKeys() []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.sizes)
}
