package lock_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// abandonCalls takes locks whose callers get an error, and lets their releases fail until another
// answer is set.
func abandonCalls(b bench, c *callCounter, l *lock.Locker, names ...string) {
	b.t.Helper()
	refused := replied("LOADING Redis is loading the dataset in memory")
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind != releaseCalls {
			if err := next(ctx, cmd); err != nil || kind != acquireCalls {
				return err
			}
		}
		cmd.SetErr(refused)
		return refused
	})
	for _, name := range names {
		_, err := l.TryAcquire(b.t.Context(), name, lock.For(lock.MaxLease))
		require.ErrorIs(b.t, err, refused)
	}
}

func TestAbandonedCallsAreTriedFewAtATime(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := lock.New(b.rdb)
	const parallel = 8
	names := b.names(100)
	abandonCalls(b, c, l, names...)
	var now, most atomic.Int64
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if kind == releaseCalls {
			n := now.Add(1)
			defer now.Add(-1)
			for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
			}
		}
		return next(ctx, cmd)
	})
	testkit.Eventually(t, startsWithin, "the release of all", func() bool {
		return b.rdb.Exists(t.Context(), names...).Val() == 0
	})
	assert.LessOrEqual(t, most.Load(), int64(parallel))
	require.NoError(t, l.Close(t.Context()))
}

func TestAbandonedCallsHaveOneBackoff(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb)
	const calls, parallel = 60, 8
	names := b.names(calls)
	abandonCalls(b, c, l, names...)
	tried := c.calls(releaseCalls)
	// Rounds begin 20, 40, 80 ... ms after the last one, so there are about six in a second.
	began := time.Now()
	testkit.Eventually(t, startsWithin, "a second", func() bool { return time.Since(began) > time.Second })
	assert.LessOrEqual(t, c.calls(releaseCalls)-tried, 10*parallel)
	c.answer(nil)
	testkit.Eventually(t, startsWithin, "the release of all", func() bool {
		return b.rdb.Exists(t.Context(), names...).Val() == 0
	})
}

// A Redis that hangs is asked no more after Close has returned.
func TestCloseBoundsTheLastTriesOfAbandonedCalls(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := lock.New(b.rdb)
	abandonCalls(b, c, l, b.names(40)...)
	var late atomic.Int64
	closed := make(chan struct{})
	c.answer(func(_ int, _ redis.ProcessHook, ctx context.Context, _ redis.Cmder) error {
		select {
		case <-closed:
			late.Add(1)
		default:
		}
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, l.Close(ctx), context.DeadlineExceeded)
	close(closed)
	began := time.Now()
	testkit.Eventually(t, startsWithin, "two tries", func() bool { return time.Since(began) > 2*time.Second })
	assert.Zero(t, late.Load())
	c.answer(nil)
	require.NoError(t, l.Close(t.Context()), "one more try of each")
	assert.Zero(t, b.rdb.Exists(t.Context(), b.names(40)...).Val())
}

// There are more calls than the queue can hold.
func TestNewestAbandonedCallIsReleased(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb)
	const queued = 16_384
	refused := replied("LOADING Redis is loading the dataset in memory")
	c.answer(func(_ int, _ redis.ProcessHook, _ context.Context, cmd redis.Cmder) error {
		cmd.SetErr(refused)
		return refused
	})
	for range queued + 100 {
		_, err := l.TryAcquire(t.Context(), b.key("ann"))
		require.ErrorIs(t, err, refused)
	}
	abandonCalls(b, c, l, b.key("bob"))
	require.Equal(t, 1, b.depth(b.key("bob")))
	c.answer(nil)
	testkit.Eventually(t, startsWithin, "the release", func() bool { return b.depth(b.key("bob")) == 0 })
}
