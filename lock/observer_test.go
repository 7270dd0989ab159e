package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// tally counts the locks that each function of an Observer reported.
type tally struct {
	Acquired, Reentered, Busy, Renewed, Failed, Lost, Released int
}

// observed adds up the reports of a Locker.
type observed struct {
	mu sync.Mutex
	tally
	waited time.Duration // the longest
}

func (o *observed) snapshot() tally {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.tally
}

// option makes a Locker report everything.
func (o *observed) option(t *testing.T) lock.Option {
	add := func(to *int) func(int) {
		return func(locks int) {
			o.mu.Lock()
			defer o.mu.Unlock()
			assert.Positive(t, locks, "an empty report")
			*to += locks
		}
	}
	return lock.WithObserver(lock.Observer{
		Acquired: func(locks int, waited time.Duration) {
			add(&o.Acquired)(locks)
			o.mu.Lock()
			defer o.mu.Unlock()
			o.waited = max(o.waited, waited)
		},
		Reentered: add(&o.Reentered),
		Busy:      add(&o.Busy),
		Renewed: func(locks int, took time.Duration, err error) {
			assert.Positive(t, took)
			if err != nil {
				add(&o.Failed)(locks)
				return
			}
			add(&o.Renewed)(locks)
		},
		Lost:     add(&o.Lost),
		Released: add(&o.Released),
	})
}

func TestObserverReceivesWhatALockerDoes(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	var o observed
	l := lock.New(b.rdb, o.option(t))
	names := b.names(5)
	want := func(what string, then tally) {
		t.Helper()
		require.Equal(t, then, o.snapshot(), what)
	}

	outer, err := l.AcquireAll(ctx, names[:3])
	require.NoError(t, err)
	want("three locks are taken in one step", tally{Acquired: 3})
	others := b.take(ctx, time.Minute, names[4])
	want("another Locker has its own observer", tally{Acquired: 3})
	some, busy, err := l.TryEach(ctx, names[2:])
	require.NoError(t, err)
	require.Len(t, busy, 2)
	want("one of three is free", tally{Acquired: 4, Busy: 2})
	_, err = l.TryAcquire(ctx, names[0])
	require.ErrorIs(t, err, lock.ErrBusy)
	want("none of one is free", tally{Acquired: 4, Busy: 3})
	_, err = l.Acquire(ctx, names[0], lock.For(0))
	require.ErrorIs(t, err, lock.ErrInvalid)
	want("invalid requests are not reported", tally{Acquired: 4, Busy: 3})

	inside := outer.Context(ctx)
	deeper, err := l.AcquireAll(inside, names[1:3])
	require.NoError(t, err)
	want("two of two are held", tally{Acquired: 4, Reentered: 2, Busy: 3})
	longer, err := l.Acquire(inside, names[2], lock.For(time.Minute))
	require.NoError(t, err)
	want("one lease is extended", tally{Acquired: 4, Reentered: 3, Busy: 3, Renewed: 1})
	require.NoError(t, outer.Release(ctx))
	want("only the first one is free", tally{Acquired: 4, Reentered: 3, Busy: 3, Renewed: 1, Released: 1})
	require.NoError(t, longer.Release(ctx))
	require.NoError(t, longer.Release(ctx), "a second release")
	require.NoError(t, deeper.Release(ctx))
	want("the other two", tally{Acquired: 4, Reentered: 3, Busy: 3, Renewed: 1, Released: 3})

	both, err := l.AcquireAll(ctx, names[:2])
	require.NoError(t, err)
	require.NoError(t, b.rdb.Del(ctx, names[0]).Err())
	require.Error(t, both.Release(ctx))
	want("one is lost and one is released",
		tally{Acquired: 6, Reentered: 3, Busy: 3, Renewed: 1, Released: 4, Lost: 1})
	require.NoError(t, others.Release(ctx))
	require.NoError(t, l.Close(ctx))
	want("Close releases", tally{Acquired: 6, Reentered: 3, Busy: 3, Renewed: 1, Released: 5, Lost: 1})
	require.ErrorIs(t, some.Err(), lock.ErrClosed)
	end := o.snapshot()
	assert.Equal(t, end.Acquired, end.Released+end.Lost, "every acquired lock is released or lost")
}

func TestObserverReceivesTheTimeOfAWait(t *testing.T) {
	b := setup(t)
	var o observed
	l := newLocker(t, b.rdb, o.option(t))
	held := b.take(t.Context(), time.Minute, b.key("ann"))
	waiting := acquiring(t, l, b.key("ann"))
	testkit.Eventually(t, startsWithin, "a busy answer", func() bool { return o.snapshot().Busy > 0 })
	asked := time.Now()
	b.waitListening(b.key("ann"), 1)
	waited := time.Since(asked)
	require.NoError(t, held.Release(t.Context()))
	await(t, waiting, startsWithin, "the lock")
	assert.GreaterOrEqual(t, o.waited, waited)
	assert.Equal(t, 1, o.snapshot().Acquired)
}

// Two leases of one owner lose one lock.
func TestObserverReceivesEachLossOnce(t *testing.T) {
	const length = 2 * time.Second
	for name, test := range map[string]struct {
		opts []lock.AcquireOption
		find func(b bench, key string, outer, inner *lock.Lease)
	}{
		"by a renewal": {nil, func(b bench, key string, outer, inner *lock.Lease) {
			held := outer.Context(b.t.Context())
			require.NoError(b.t, b.rdb.Del(b.t.Context(), key).Err())
			awaitLoss(b.t, held, startsWithin)
		}},
		"by the watchdog, at the end": {
			[]lock.AcquireOption{lock.For(length)},
			func(b bench, key string, outer, inner *lock.Lease) {
				awaitLoss(b.t, outer.Context(b.t.Context()), startsWithin)
			},
		},
		"by a release, at the end": {
			[]lock.AcquireOption{lock.For(length)},
			func(b bench, key string, outer, inner *lock.Lease) {
				testkit.Eventually(b.t, startsWithin, "the end of the lease", func() bool { return inner.Err() != nil })
			},
		},
		"by the last release": {
			[]lock.AcquireOption{lock.For(time.Minute)},
			func(b bench, key string, outer, inner *lock.Lease) {
				require.NoError(b.t, inner.Release(b.t.Context()))
				require.NoError(b.t, b.rdb.Del(b.t.Context(), key).Err())
			},
		},
		"by a reentry": {[]lock.AcquireOption{lock.For(time.Minute)}, func(b bench, key string, outer, inner *lock.Lease) {
			inside := outer.Context(b.t.Context())
			require.NoError(b.t, b.rdb.Del(b.t.Context(), key).Err())
			for range 2 {
				_, err := b.Acquire(context.WithoutCancel(inside), key, lock.For(time.Hour))
				require.ErrorIs(b.t, err, lock.ErrLost)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := setup(t)
			ctx := t.Context()
			var o observed
			b.Locker = lock.New(b.rdb, lock.WithLease(length), o.option(t))
			outer, err := b.Acquire(ctx, b.key("ann"), test.opts...)
			require.NoError(t, err)
			inner, err := b.Acquire(outer.Context(ctx), b.key("ann"), test.opts...)
			require.NoError(t, err)
			test.find(b, b.key("ann"), outer, inner)
			require.Equal(t, []string{b.key("ann")}, lostKeys(t, outer.Release(ctx)))
			if err := inner.Release(ctx); err != nil {
				require.ErrorIs(t, err, lock.ErrLost)
			}
			require.NoError(t, b.Close(ctx), "nothing is left, and no loss is reported again")
			assert.Equal(t, 1, o.snapshot().Lost)
			assert.Equal(t, 1, o.snapshot().Acquired)
		})
	}
}

// The answer arrives after the holder has learned of the loss.
func TestObserverReceivesALossWithALateAnswerOnce(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	key := b.key("ann")
	var o observed
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb, o.option(t))
	answered, goOn := make(chan struct{}, 1), make(chan struct{})
	c.answer(func(kind int, next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if kind == renewalCalls {
			answered <- struct{}{}
			<-goOn
		}
		return err
	})
	lease, err := l.Acquire(ctx, key, lock.For(2*time.Second))
	require.NoError(t, err)
	held := lease.Context(ctx)
	require.NoError(t, b.rdb.Del(ctx, key).Err())
	deeper := make(chan error, 1)
	go func() {
		_, err := l.Acquire(context.WithoutCancel(held), key, lock.For(time.Hour))
		deeper <- err
	}()
	await(t, answered, startsWithin, "a renewal that finds the loss")
	awaitLoss(t, held, startsWithin)
	require.Equal(t, 1, o.snapshot().Lost)
	close(goOn)
	require.Equal(t, []string{key}, lostKeys(t, await(t, deeper, startsWithin, "the delayed answer")))
	require.Equal(t, []string{key}, lostKeys(t, lease.Release(ctx)))
	assert.Equal(t, tally{Acquired: 1, Renewed: 1, Lost: 1}, o.snapshot())
}

func TestObserverReceivesFailedRenewals(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	var o observed
	c := countCalls(t, b.rdb)
	l := newLocker(t, b.rdb, o.option(t))
	outer, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	away := errors.New("Redis is away")
	c.answer(func(int, redis.ProcessHook, context.Context, redis.Cmder) error { return away })
	_, err = l.Acquire(outer.Context(ctx), b.key("ann"), lock.For(time.Hour))
	require.ErrorIs(t, err, away)
	assert.Equal(t, tally{Acquired: 1, Failed: 1}, o.snapshot())
	c.answer(nil)
	require.NoError(t, outer.Release(ctx), "a failed renewal is not a loss")
	assert.Equal(t, tally{Acquired: 1, Failed: 1, Released: 1}, o.snapshot())
}
