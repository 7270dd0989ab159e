package lock_test

import (
	"context"
	"strings"
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
		case asked <- cmd.Args()[len(cmd.Args())-3]:
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
			asked = append(asked, cmd.Args()[len(cmd.Args())-3])
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
