package lock_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lock"
)

// The error names the allowed range.
func TestInvalidSettingsAndKeysMakeNoCall(t *testing.T) {
	b := setup(t)
	c := countCalls(t, b.rdb)
	const leases = "want 10ms to 1h0m0s"
	long := strings.Repeat("k", lock.MaxKeyBytes+1)
	type options = []lock.Option
	for name, test := range map[string]struct {
		locker  options
		acquire []lock.AcquireOption
		key     string
		want    []string
	}{
		"a short lease of the Locker": {
			locker: options{lock.WithLease(lock.MinLease - 1)},
			want:   []string{"lease of 9.999999ms", leases},
		},
		"no lease of the Locker": {locker: options{lock.WithLease(0)}, want: []string{"lease of 0s", leases}},
		"a long lease of the Locker": {
			locker: options{lock.WithLease(lock.MaxLease + 1)},
			want:   []string{"lease of 1h0m0.000000001s", leases},
		},
		"a short poll": {
			locker: options{lock.WithPoll(10*time.Millisecond - 1)},
			want:   []string{"poll of 9.999999ms", "want at least 10ms"},
		},
		"a negative poll": {
			locker: options{lock.WithPoll(-time.Second)},
			want:   []string{"poll of -1s", "want at least 10ms"},
		},
		"no prefix": {
			locker: options{lock.WithPrefix("")},
			want:   []string{"prefix of 0 bytes", "want 1 to 1024"},
		},
		"a long prefix": {
			locker: options{lock.WithPrefix(long)},
			want:   []string{"prefix of 1025 bytes", "want 1 to 1024"},
		},
		"a short lease": {
			acquire: []lock.AcquireOption{lock.For(lock.MinLease - 1)},
			want:    []string{"lease of 9.999999ms", leases},
		},
		"no lease": {acquire: []lock.AcquireOption{lock.For(0)}, want: []string{"lease of 0s", leases}},
		"a negative lease": {
			acquire: []lock.AcquireOption{lock.For(-time.Second)},
			want:    []string{"lease of -1s", leases},
		},
		"a long lease": {
			acquire: []lock.AcquireOption{lock.For(lock.MaxLease + 1)},
			want:    []string{"lease of 1h0m0.000000001s", leases},
		},
		"a long key":   {key: long, want: []string{"key of 1025 bytes", "want 1 to 1024"}},
		"an empty key": {key: "-", want: []string{"key of 0 bytes", "want 1 to 1024"}},
	} {
		t.Run(name, func(t *testing.T) {
			keys := []string{b.key("ann")}
			if test.key != "" {
				keys = []string{strings.TrimPrefix(test.key, "-"), b.key("ann")}
			}
			l := newLocker(t, b.rdb, test.locker...)
			ask := lockCalls(t.Context(), l, keys, test.acquire...)
			multi, err := lock.NewMulti([]*lock.Locker{l})
			require.NoError(t, err)
			ask["Multi.Acquire"] = func() error {
				_, err := multi.Acquire(t.Context(), keys[0], test.acquire...)
				return err
			}
			if test.key != "" {
				ask["ForceRelease"] = func() error { _, err := l.ForceRelease(t.Context(), keys[0]); return err }
			}
			for call, f := range ask {
				err := f()
				require.ErrorIs(t, err, lock.ErrInvalid, call)
				for _, part := range test.want {
					require.ErrorContains(t, err, part, call)
				}
			}
		})
	}
	t.Run("too many keys", func(t *testing.T) {
		_, _, err := b.TryEach(t.Context(), make([]string, lock.MaxKeys+1))
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.ErrorContains(t, err, "65537 keys, want at most 65536")
		_, err = b.AcquireAll(t.Context(), make([]string, lock.MaxKeysAtOnce+1))
		require.ErrorIs(t, err, lock.ErrInvalid)
		require.ErrorContains(t, err, "513 keys at once, want at most 512")
	})
	assert.Zero(t, c.all())
}

func TestLimitsAreValid(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	for name, opts := range map[string][]lock.Option{
		"longest": {
			lock.WithLease(lock.MaxLease),
			lock.WithPrefix(b.key("p") + strings.Repeat("p", lock.MaxKeyBytes-len(b.key("p")))),
		},
		"shortest": {lock.WithPoll(10 * time.Millisecond), lock.WithPrefix(b.key("x"))},
	} {
		l := newLocker(t, b.rdb, opts...)
		longest := b.key("") + strings.Repeat("k", lock.MaxKeyBytes-len(b.key("")))
		lease, err := l.Acquire(ctx, longest)
		require.NoError(t, err, name)
		require.NoError(t, lease.Release(ctx))
		lease, err = l.AcquireAll(ctx, b.names(lock.MaxKeysAtOnce), lock.For(lock.MaxLease))
		require.NoError(t, err, name)
		require.NoError(t, lease.Release(ctx))
	}

	// The shortest lease may end before a busy machine has looked at it, so this checks what Redis
	// is asked for.
	asked := make(chan any, 1)
	b.rdb.AddHook(testkit.Hook(func(_ redis.ProcessHook, _ context.Context, cmd redis.Cmder) error {
		select {
		case asked <- cmd.Args()[len(cmd.Args())-4]:
		default: // a release of the lock, maybe later
		}
		return context.Canceled
	}))
	_, err := newLocker(t, b.rdb, lock.WithLease(lock.MinLease)).TryAcquire(ctx, b.key("ann"))
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, "10", await(t, asked, startsWithin, "a call to Redis"))
}

// Redis counts milliseconds, and the holder must not rely on more.
func TestLeaseIsCutToWholeMilliseconds(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	var asked []any
	b.rdb.AddHook(testkit.Hook(func(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
		if len(cmd.Args()) > 4 {
			asked = append(asked, cmd.Args()[len(cmd.Args())-4])
		}
		return next(ctx, cmd)
	}))
	lease, err := b.TryAcquire(ctx, b.key("ann"), lock.For(time.Minute+time.Millisecond-1))
	require.NoError(t, err)
	assert.Equal(t, "60000", asked[0])
	require.NoError(t, lease.Release(ctx))
}

func TestPrefixNamesTheLockersOwnKeys(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	prefix := b.key("mine")
	l := newLocker(t, b.rdb, lock.WithPrefix(prefix))
	lease, err := l.Acquire(ctx, b.key("ann"))
	require.NoError(t, err)
	last, err := b.rdb.Get(ctx, prefix+":fence").Int64()
	require.NoError(t, err)
	assert.Equal(t, lease.Token(b.key("ann")), last)
	require.NoError(t, lease.Release(ctx))
	receipts, err := b.rdb.Keys(ctx, prefix+":receipt:*").Result()
	require.NoError(t, err)
	assert.Len(t, receipts, 1)
}

// A Ring would choose the server by the receipt, which differs between callers.
func TestOtherClientTypesAreInvalid(t *testing.T) {
	b := setup(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": b.rdb.Options().Addr}})
	t.Cleanup(func() { _ = ring.Close() })
	for call, ask := range lockCalls(t.Context(), newLocker(t, ring), b.names(5)) {
		err := ask()
		require.ErrorIs(t, err, lock.ErrInvalid, call)
		assert.ErrorContains(t, err, "*redis.Ring", call)
	}
	_, err := newLocker(t, ring).ForceRelease(t.Context(), b.key("ann"))
	require.ErrorIs(t, err, lock.ErrInvalid)
}

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

func TestLookReportsTheHolder(t *testing.T) {
	b := setup(t)
	ctx, key := t.Context(), b.key("ann")
	other := newLocker(t, b.rdb)

	holding, err := b.Look(ctx, key)
	require.NoError(t, err)
	assert.Equal(t, lock.Holding{}, holding)
	assert.False(t, holding.Held())

	outer := b.take(ctx, time.Minute, key, b.key("bob"))
	inner := b.take(outer.Context(ctx), time.Second, key)
	mine, err := b.Look(ctx, key)
	require.NoError(t, err)
	assert.True(t, mine.Held())
	assert.True(t, mine.Mine)
	assert.Equal(t, 2, mine.Depth, "counted in this process")
	assert.LessOrEqual(t, mine.Left, time.Minute)
	assert.Greater(t, mine.Left, 30*time.Second)
	fields, err := b.rdb.HKeys(ctx, key).Result()
	require.NoError(t, err)
	assert.Equal(t, fields, []string{mine.Owner})
	assert.Regexp(t, `^[0-9a-f-]{36}:\d+$`, mine.Owner, "as Redisson's names")

	theirs, err := other.Look(ctx, key)
	require.NoError(t, err)
	assert.Equal(t, mine.Owner, theirs.Owner)
	assert.False(t, theirs.Mine)
	assert.Equal(t, 1, theirs.Depth)

	require.NoError(t, inner.Release(ctx))
	mine, err = b.Look(ctx, key)
	require.NoError(t, err)
	assert.Equal(t, 1, mine.Depth)
	require.NoError(t, outer.Release(ctx))
	holding, err = other.Look(ctx, key)
	require.NoError(t, err)
	assert.False(t, holding.Held())
}

func TestLookReportsRedissonsHolders(t *testing.T) {
	b := setup(t)
	ctx := t.Context()
	const thread = "6f2c0de5-7d9e-4a43-9c5a-2f4e1b9d1c52:47"
	require.NoError(t, b.rdb.HSet(ctx, b.key("ann"), thread, 3).Err())
	holding, err := b.Look(ctx, b.key("ann"))
	require.NoError(t, err)
	assert.Equal(t, lock.Holding{Owner: thread, Depth: 3}, holding, "a lock without expiry")

	// A read lock has a field that names its kind.
	require.NoError(t, b.rdb.HSet(ctx, b.key("bob"), "mode", "read", thread, 1).Err())
	require.NoError(t, b.rdb.PExpire(ctx, b.key("bob"), time.Minute).Err())
	holding, err = b.Look(ctx, b.key("bob"))
	require.NoError(t, err)
	assert.Equal(t, thread, holding.Owner)
	assert.Positive(t, holding.Left)
}

func TestLookRejectsOtherTypesAndInvalidKeys(t *testing.T) {
	b := setup(t)
	require.NoError(t, b.rdb.Set(t.Context(), b.key("ann"), "text", 0).Err())
	_, err := b.Look(t.Context(), b.key("ann"))
	require.ErrorContains(t, err, "WRONGTYPE")
	_, err = b.Look(t.Context(), strings.Repeat("x", lock.MaxKeyBytes+1))
	require.ErrorIs(t, err, lock.ErrInvalid)
	_, err = b.Look(t.Context(), "")
	require.ErrorIs(t, err, lock.ErrInvalid)
}
