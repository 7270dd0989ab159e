package lock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

const (
	// startsWithin bounds the start of a process, and all waits for something that happens soon.
	startsWithin = 30 * time.Second
	// never is a poll that does not happen during a test.
	never = 10 * time.Minute
)

// holdElsewhere starts a process that holds the lock of a key, and returns it with its token; see
// command.
func holdElsewhere(t *testing.T, key string, lease time.Duration, databaseURL string) (*testkit.Cmd, int64) {
	t.Helper()
	holder := testkit.Command(t, "hold", key)
	holder.Input()
	holder.Setenv("REDIS_URL", testkit.RedisURL(t))
	holder.Setenv("LOCK_LEASE", lease.String())
	holder.Setenv("DATABASE_URL", databaseURL)
	holder.Start()
	var token int64
	_, err := fmt.Sscanf(holder.WaitOutput(startsWithin, "held token="), "held token=%d", &token)
	require.NoError(t, err)
	return holder, token
}

// acquiring runs Acquire in a goroutine that ends with the test. The test fails if it gets no
// lease.
func acquiring(t *testing.T, l *lock.Locker, key string, opts ...lock.AcquireOption) <-chan *lock.Lease {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	leases := make(chan *lock.Lease, 1)
	ended := make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	go func() {
		defer close(ended)
		defer close(leases)
		if lease, err := l.Acquire(ctx, key, opts...); ctx.Err() == nil && assert.NoError(t, err) {
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

// All times are Redis's: leases end by its clock, and tokens are its time in microseconds.
func TestSuccessorsOfAKilledHolderWaitForTheEndOfItsLease(t *testing.T) {
	b := setup(t)
	key := b.key("ann")
	const lease = 6 * time.Second
	holder, token := holdElsewhere(t, key, lease, "")
	acquired := b.expiry(key)

	// One waiter knows when the lease ends, the others poll.
	var waiting []<-chan *lock.Lease
	for _, poll := range []time.Duration{never, 10 * time.Millisecond, 10 * time.Millisecond} {
		waiting = append(waiting, acquiring(t, newLocker(t, b.rdb, lock.WithPoll(poll)), key))
	}
	b.waitListening(key, int64(len(waiting)))
	b.waitRenewed(key, acquired)
	for _, leases := range waiting {
		require.Empty(t, leases, "the watchdog renews the lock")
	}

	holder.Kill()
	ends, killed := b.expiry(key), b.now()
	require.LessOrEqual(t, ends.Sub(killed), lease)
	var tokens []int64
	for range waiting {
		var first *lock.Lease
		testkit.Eventually(t, lease+startsWithin, "a successor", func() bool {
			for _, leases := range waiting {
				if len(leases) > 0 {
					first = <-leases
					return true
				}
			}
			return false
		})
		tokens = append(tokens, first.Token(key))
		require.NoError(t, first.Release(t.Context()))
	}
	require.True(t, slices.IsSorted(tokens), "%d", tokens)
	assert.Greater(t, tokens[0], token)
	assert.Greater(t, tokens[0], ends.UnixMicro(), "the first successor came before the end of the lease")
	assert.Less(t, tokens[0], ends.Add(startsWithin).UnixMicro(), "the first successor came late")
}

func TestFrozenHolderLearnsOfItsLossBeforeItWrites(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	key := b.key("ann")
	const lease = 2 * time.Second
	pool := testkit.Pool(t)
	_, err := pool.Exec(ctx, fencedRow)
	require.NoError(t, err)
	fence := func() (fence, writes int64) {
		require.NoError(t, pool.QueryRow(ctx, "SELECT fence, writes FROM fenced").Scan(&fence, &writes))
		return fence, writes
	}
	victim, token := holdElsewhere(t, key, lease, testkit.DatabaseURL(t))
	victim.WriteLine("write once")
	victim.WaitOutput(startsWithin, "write once: written")
	last, writes := fence()
	require.Equal(t, token, last)
	require.EqualValues(t, 1, writes)

	successors := acquiring(t, newLocker(t, b.rdb, lock.WithPoll(never)), key, lock.For(time.Minute))
	b.waitListening(key, 1)
	victim.Freeze()
	ends := b.expiry(key)
	successor := await(t, successors, lease+startsWithin, "the lock of a frozen holder")
	assert.Greater(t, successor.Token(key), ends.UnixMicro(), "the successor came before the end of the lease")
	require.Greater(t, successor.Token(key), token)
	written, err := writeFenced(ctx, pool, successor.Token(key))
	require.NoError(t, err)
	require.True(t, written)

	// The victim runs these commands as soon as it continues.
	for _, line := range []string{"write again", "look", "blind", "release"} {
		victim.WriteLine(line)
	}
	victim.Thaw()
	require.Equal(t, "write again: lost", victim.WaitOutput(startsWithin, "write again: "))
	require.Equal(t, "look: lost", victim.WaitOutput(startsWithin, "look: "))
	require.Equal(t, "ended: lock lost: "+key, victim.WaitOutput(startsWithin, "ended: "))
	require.Equal(t, "blind: refused", victim.WaitOutput(startsWithin, "blind: "),
		"the fence refuses a holder that does not ask")
	require.Equal(t, "release: lost", victim.WaitOutput(startsWithin, "release: "))
	last, writes = fence()
	require.Equal(t, successor.Token(key), last)
	require.EqualValues(t, 2, writes)

	require.Equal(t, 1, b.depth(key), "the victim's release leaves the successor's lock alone")
	require.NoError(t, successor.Err())
	require.NoError(t, successor.Release(ctx))
}
