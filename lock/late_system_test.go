//go:build system

package lock_test

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
	"stampede/lua"
)

// orders returns all interleavings of two sequences.
func orders(some, other int) [][]bool {
	var all [][]bool
	switch {
	case some == 0 || other == 0:
		return [][]bool{slices.Concat(slices.Repeat([]bool{false}, some), slices.Repeat([]bool{true}, other))}
	default:
		for _, rest := range orders(some-1, other) {
			all = append(all, append([]bool{false}, rest...))
		}
		for _, rest := range orders(some, other-1) {
			all = append(all, append([]bool{true}, rest...))
		}
	}
	return all
}

// All attempts of an acquire are held back, and all attempts to release what it may have taken.
func TestAbandonedAcquireLeavesNoLockInAnyOrderOfArrival(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	prefix := b.key("locker")
	n, slow := slowNetTo(t, b.rdb)
	held := b.take(ctx, time.Minute, b.key("cid"))
	for name, acquire := range map[string]func(ctx context.Context, l *lock.Locker) error{
		"Acquire": func(ctx context.Context, l *lock.Locker) error {
			_, err := l.Acquire(ctx, b.key("ann"))
			return err
		},
		"AcquireAll": func(ctx context.Context, l *lock.Locker) error {
			_, err := l.AcquireAll(ctx, []string{b.key("ann"), b.key("bob")}, lock.For(time.Hour))
			return err
		},
		"TryEach": func(ctx context.Context, l *lock.Locker) error {
			_, _, err := l.TryEach(ctx, []string{b.key("ann"), b.key("bob"), b.key("cid")}, lock.For(time.Hour))
			return err
		},
	} {
		once, giveUp := context.WithCancel(ctx)
		defer giveUp()
		// A waiter gives up after its first attempt.
		l := lock.New(slow, lock.WithPrefix(prefix), lock.WithObserver(lock.Observer{Unreachable: func(int, error) {
			giveUp()
		}}))
		n.keepNext(1000)
		require.Error(t, acquire(once, l))
		require.NoError(t, l.Close(ctx)) // until then it retries the release
		calls := n.first(t, 4)
		acquires, releases := calls[:2], calls[2:]
		require.Equal(t, acquires[0], acquires[1])
		require.Equal(t, releases[0], releases[1])
		for _, order := range orders(2, 2) {
			taken := false
			for _, release := range order {
				if release {
					n.deliver(t, releases[0])
				} else {
					n.deliver(t, acquires[0])
				}
				taken = taken || b.depth(b.key("ann")) > 0
			}
			assert.Equal(t, !order[0], taken, "%s: a call that arrives before the release takes the lock", name)
			for _, key := range []string{"ann", "bob"} {
				assert.Zero(t, b.depth(b.key(key)), "%s leaves a lock when the releases arrive at %v", name, order)
			}
			left, err := b.rdb.Keys(ctx, prefix+":receipt:*").Result()
			require.NoError(t, err)
			require.Len(t, left, 1)
			require.NoError(t, b.rdb.Del(ctx, left...).Err()) // restores the state before
		}
	}
	require.Equal(t, 1, b.depth(b.key("cid")))
	require.NoError(t, held.Release(ctx))
}

// No open connection is left for a release while Redis hangs: a new one waits for Redis to answer
// HELLO.
func TestAbandonedLockIsReleasedWhenRedisAnswersAgain(t *testing.T) {
	server, b := ownServer(t)
	ctx := t.Context()
	key := b.key("ann")
	for _, script := range []*redis.Script{lua.LockAcquire, lua.LockRelease} {
		require.NoError(t, script.Load(ctx, b.rdb).Err())
	}
	slow := redis.NewClient(&redis.Options{
		Addr: b.rdb.Options().Addr, ReadTimeout: 200 * time.Millisecond, MaxRetries: -1,
		DialTimeout: 50 * time.Millisecond, DialerRetries: 1,
	})
	t.Cleanup(func() { _ = slow.Close() })
	testkit.Eventually(t, startsWithin, "the only open connection", func() bool { return slow.Ping(ctx).Err() == nil })
	l := newLocker(t, slow)
	calls := func() (n int) {
		stats, err := b.rdb.Info(ctx, "commandstats").Result()
		require.NoError(t, err)
		_, calls, _ := strings.Cut(stats, "cmdstat_evalsha:calls=")
		calls, _, _ = strings.Cut(calls, ",")
		n, _ = strconv.Atoi(calls) // 0 before the first call
		return n
	}
	require.Zero(t, calls())

	server.Freeze()
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := l.Acquire(short, key, lock.For(lock.MaxLease))
	require.ErrorIs(t, err, lock.ErrBusy)
	server.Thaw()
	testkit.Eventually(t, startsWithin, "the acquire and the release arrive", func() bool {
		return calls() >= 2 && b.depth(key) == 0
	})
}
