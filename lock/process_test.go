package lock_test

import (
	"context"
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
