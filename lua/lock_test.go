package lua_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

// lockBench runs the scripts of the lock and collects their answers. Names are keys of the test.
type lockBench struct {
	t       *testing.T
	rdb     redis.UniversalClient
	key     func(name string) string
	answers []string
}

func newLockBench(t *testing.T) *lockBench {
	t.Helper()
	keys := testkit.Keys(t)
	return &lockBench{t: t, rdb: testkit.Redis(t), key: func(name string) string { return keys.Lock(0, name) }}
}

func (b *lockBench) keys(names ...string) []string {
	keys := make([]string, len(names))
	for i, name := range names {
		keys[i] = b.key(name)
	}
	return keys
}

// acquire returns the token, the time to wait, and the answers.
func (b *lockBench) acquire(
	receipt string, serial int, owner string, lease time.Duration, mode string, names ...string,
) (token, wait int64, answers []string) {
	b.t.Helper()
	reply, err := lua.LockAcquire.Run(b.t.Context(), b.rdb, append(b.keys(receipt, "fence"), b.keys(names...)...),
		serial, 60_000, owner, lease.Milliseconds(), mode, "none", "kept").Slice()
	require.NoError(b.t, err)
	for _, word := range reply[3:] {
		answers = append(answers, word.(string))
	}
	b.answers = append(b.answers, answers...)
	token, err = strconv.ParseInt(reply[0].(string), 10, 64)
	require.NoError(b.t, err)
	return token, reply[1].(int64), answers
}

func (b *lockBench) release(receipt string, serial int, owner string, names ...string) []string {
	b.t.Helper()
	answers, err := lua.LockRelease.Run(b.t.Context(), b.rdb, append(b.keys(receipt), b.keys(names...)...),
		serial, 60_000, owner, "publish", "kept").StringSlice()
	require.NoError(b.t, err)
	b.answers = append(b.answers, answers...)
	return answers
}

func (b *lockBench) owners(name string) map[string]string {
	b.t.Helper()
	owners, err := b.rdb.HGetAll(b.t.Context(), b.key(name)).Result()
	require.NoError(b.t, err)
	return owners
}

// requireAllAnswers compares the collected answers with the script's header.
func (b *lockBench) requireAllAnswers(script string) {
	b.t.Helper()
	slices.Sort(b.answers)
	require.ElementsMatch(b.t, readHeader(b.t, script).answers, slices.Compact(b.answers))
}

func TestLockAcquireGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	token, wait, answers := b.acquire("r1", 1, "first", time.Minute, "all", "ann", "bob")
	require.Equal(t, []string{"held", "held"}, answers)
	require.Zero(t, wait)
	for try := range 3 {
		again, _, answers := b.acquire("r1", 1, "first", time.Minute, "all", "ann", "bob")
		require.Equal(t, []string{"held", "held"}, answers)
		require.Greater(t, again, token)

		none, wait, answers := b.acquire("r2", 2, "second", time.Minute, "all", "ann", "cid")
		require.Equal(t, "busy", answers[0])
		if try == 0 {
			require.Equal(t, "free", answers[1], "all or nothing")
		}
		require.Zero(t, none)
		require.InDelta(t, 60_000, wait, 10_000)
		require.Empty(t, b.owners("cid"))

		some, wait, answers := b.acquire("r3", 3, "third", time.Minute, "each", "ann", "dan")
		require.Equal(t, []string{"busy", "held"}, answers)
		require.Greater(t, some, again)
		require.InDelta(t, 60_000, wait, 10_000)
		require.Equal(t, map[string]string{"third": "1"}, b.owners("dan"))
		require.Equal(t, map[string]string{"first": "1"}, b.owners("ann"))
		token = some
	}
	b.requireAllAnswers("lock_acquire")
}

func TestLockAcquireSetsOwnerAndLeaseOfEveryLock(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.acquire("r1", 1, "first", time.Minute, "all", "ann")
	for i, names := range [][]string{{"bob", "cid", "bob", "cid", "dan"}, {"eve", "ann", "fay", "eve", "gus"}} {
		owner := fmt.Sprint("owner-", i)
		_, _, answers := b.acquire("r2", 2+i, owner, 10*time.Minute, "each", names...)
		for j, name := range names {
			if name == "ann" {
				require.Equal(t, "busy", answers[j])
				continue
			}
			require.Equal(t, "held", answers[j], name)
			require.Equal(t, map[string]string{owner: "1"}, b.owners(name), name)
			require.InDelta(t, 600, b.rdb.PTTL(t.Context(), b.key(name)).Val().Seconds(), 10, name)
		}
	}
	require.Equal(t, map[string]string{"first": "1"}, b.owners("ann"))
	require.InDelta(t, 60, b.rdb.PTTL(t.Context(), b.key("ann")).Val().Seconds(), 10)

	require.NoError(t, b.rdb.Set(t.Context(), b.key("odd"), "no lock", 0).Err())
	err := lua.LockAcquire.Run(t.Context(), b.rdb, append(b.keys("r3", "fence"), b.keys("hal", "odd")...), 9, 60_000,
		"third", 60_000, "each", "none", "kept").Err()
	require.ErrorContains(t, err, "WRONGTYPE")
	require.Empty(t, b.owners("hal"), "a key of another type rejects the whole call")
}

func TestLockAcquireRepeatTakesNoMoreLocks(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"each", "all"} {
		t.Run(mode, func(t *testing.T) {
			b := newLockBench(t)
			b.acquire("r1", 1, "first", time.Minute, "all", "ann")
			b.acquire("r2", 2, "second", time.Minute, mode, "ann", "bob")
			b.release("r1", 3, "first", "ann")

			_, _, answers := b.acquire("r2", 2, "second", time.Minute, mode, "ann", "bob")
			require.Equal(t, "busy", answers[0], "the first answer was busy")
			require.Empty(t, b.owners("ann"))
			_, _, answers = b.acquire("r2", 4, "third", time.Minute, mode, "ann")
			require.Equal(t, []string{"held"}, answers, "the next call that uses the receipt is a new one")
		})
	}
}

func TestAbandonedLockCallsAreRejected(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	require.Equal(t, []string{"lost"}, b.release("r1", 2, "first", "ann"), "nothing was taken yet")
	err := lua.LockAcquire.Run(t.Context(), b.rdb, b.keys("r1", "fence", "ann"), 1, 60_000, "first", 60_000, "all",
		"none", "kept").Err()
	require.ErrorContains(t, err, "ERR stale")
	require.Empty(t, b.owners("ann"))

	require.Equal(t, []string{"lost"}, b.release("r1", 4, "second", "ann"))
	_, _, answers := b.acquire("r2", 5, "third", time.Minute, "all", "ann")
	require.Equal(t, []string{"held"}, answers)
	err = lua.LockRelease.Run(t.Context(), b.rdb, b.keys("r1", "ann"), 3, 60_000, "first", "publish", "kept").Err()
	require.ErrorContains(t, err, "ERR stale", "a late release")
	require.Len(t, b.owners("ann"), 1)
}

func TestLockTokensIncreaseAfterLossOfFence(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	last, serial := int64(0), 0
	next := func() int64 {
		t.Helper()
		serial++
		token, _, answers := b.acquire("r", serial, "owner"+strconv.Itoa(serial), time.Minute, "all", "ann")
		require.Equal(t, []string{"held"}, answers)
		require.Greater(t, token, last)
		last = token
		serial++
		b.release("r", serial, "owner"+strconv.Itoa(serial-1), "ann")
		return token
	}
	next()
	next()
	require.NoError(t, b.rdb.Del(t.Context(), b.key("fence")).Err())
	fromClock := next()
	now := b.rdb.Time(t.Context()).Val().UnixMicro()
	require.InDelta(t, now, fromClock, 60e6, "the clock of Redis, in microseconds")

	ahead := now + 3_600_000_000 // as if the clock was set back by an hour
	require.NoError(t, b.rdb.Set(t.Context(), b.key("fence"), ahead, 0).Err())
	require.Equal(t, ahead+1, next())
	require.Equal(t, ahead+2, next())
	require.Equal(t, strconv.FormatInt(ahead+2, 10), b.rdb.Get(t.Context(), b.key("fence")).Val())
	ttl := b.rdb.PTTL(t.Context(), b.key("fence")).Val()
	require.Positive(t, ttl, "every key has an expiry")
	require.LessOrEqual(t, ttl, 24*time.Hour)
}

func TestLockReleaseGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.acquire("r1", 1, "first", time.Minute, "all", "ann", "bob", "dan")
	b.acquire("r2", 2, "second", time.Minute, "all", "cid")
	b.answers = nil
	require.NoError(t, b.rdb.Del(t.Context(), b.key("bob")).Err())
	require.NoError(t, b.rdb.Set(t.Context(), b.key("dan"), "not a lock", 0).Err())
	for range 3 {
		require.Equal(t, []string{"lost", "released", "lost", "lost"},
			b.release("r1", 3, "first", "dan", "ann", "bob", "cid"))
		require.Empty(t, b.owners("ann"))
		require.Equal(t, map[string]string{"second": "1"}, b.owners("cid"))
	}

	listener := b.rdb.Subscribe(t.Context(), "redisson_lock__channel:"+b.key("ann"))
	t.Cleanup(func() { _ = listener.Close() })
	_, err := listener.Receive(t.Context())
	require.NoError(t, err)
	b.acquire("r3", 4, "third", time.Minute, "all", "ann", "bob")
	first := b.answers[:3]
	b.answers = nil
	require.Equal(t, []string{"notified 1", "released"}, b.release("r3", 5, "third", "ann", "bob"))
	require.Equal(t, []string{"released", "released"}, b.release("r3", 5, "third", "ann", "bob"), "a repeat")
	b.answers = append(first, "notified")
	b.requireAllAnswers("lock_release")
}

func TestLockRenewGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.acquire("r1", 1, "first", time.Minute, "all", "ann")
	b.acquire("r2", 2, "second", 10*time.Minute, "all", "bob")
	require.NoError(t, b.rdb.Set(t.Context(), b.key("dan"), "not a lock", 0).Err())
	b.answers = nil
	answers, err := lua.LockRenew.Run(t.Context(), b.rdb, b.keys("ann", "bob", "bob", "cid", "dan"),
		120_000, "kept", "first", "second", "first", "first", "first").StringSlice()
	require.NoError(t, err)
	require.Equal(t, []string{"renewed", "renewed", "lost", "lost", "lost"}, answers)
	b.answers = answers
	b.requireAllAnswers("lock_renew")
	assert.InDelta(t, 120, b.rdb.PTTL(t.Context(), b.key("ann")).Val().Seconds(), 10)
	assert.InDelta(t, 600, b.rdb.PTTL(t.Context(), b.key("bob")).Val().Seconds(), 10, "a renewal does not shorten a lease")
	assert.Empty(t, b.owners("cid"), "a lost lock is not taken again")

	b.acquire("r1", 1, "first", time.Minute, "all", "ann")
	assert.InDelta(t, 120, b.rdb.PTTL(t.Context(), b.key("ann")).Val().Seconds(), 10, "a late acquire shortens no lease")
}

func TestLockForceGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.acquire("r1", 1, "first", time.Minute, "all", "ann")
	b.answers = nil
	force := func(serial int) string {
		answer, err := lua.LockForce.Run(t.Context(), b.rdb, b.keys("r2", "ann"), serial, 60_000, "publish").Text()
		require.NoError(t, err)
		b.answers = append(b.answers, answer)
		return answer
	}
	require.Equal(t, "released", force(2))
	require.Empty(t, b.owners("ann"))
	b.acquire("r1", 3, "next", time.Minute, "all", "ann")
	b.answers = b.answers[:1]
	require.Equal(t, "released", force(2))
	require.Equal(t, map[string]string{"next": "1"}, b.owners("ann"))

	require.Equal(t, []string{"lost"}, b.release("r2", 4, "none", "ann"), "abandoned")
	b.answers = b.answers[:2]
	require.ErrorContains(t, lua.LockForce.Run(t.Context(), b.rdb, b.keys("r2", "ann"), 2, 60_000, "publish").Err(),
		"ERR stale")
	require.Len(t, b.owners("ann"), 1)
	require.Equal(t, "released", force(5))
	require.Equal(t, "free", force(6))
	b.requireAllAnswers("lock_force")

	require.NoError(t, b.rdb.Set(t.Context(), b.key("ann"), "not a lock", 0).Err())
	require.ErrorContains(t, lua.LockForce.Run(t.Context(), b.rdb, b.keys("r3", "ann"), 4, 60_000, "publish").Err(),
		"WRONGTYPE")
	require.Equal(t, "not a lock", b.rdb.Get(t.Context(), b.key("ann")).Val())
}

func TestLockReleasePublishesOnRedissonsChannel(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	plain := b.key("ann")[:len("test-")+26] + "-ann"
	for key, channel := range map[string]string{
		b.key("ann"): "redisson_lock__channel:" + b.key("ann"), // the key has a brace
		plain:        "redisson_lock__channel:{" + plain + "}",
	} {
		listener := b.rdb.Subscribe(t.Context(), channel)
		t.Cleanup(func() { _ = listener.Close() })
		_, err := listener.Receive(t.Context()) // the subscription
		require.NoError(t, err)
		t.Cleanup(func() { b.rdb.Del(t.Context(), key) })
		take := func(serial int) {
			require.NoError(t, lua.LockAcquire.Run(t.Context(), b.rdb, []string{b.key("r"), b.key("fence"), key},
				serial, 60_000, fmt.Sprint("owner", serial), 60_000, "all", "none", "kept").Err())
		}
		messages := listener.Channel()
		take(1)
		require.NoError(t, lua.LockRelease.Run(t.Context(), b.rdb, []string{b.key("r"), key}, 2, 60_000, "owner1",
			"publish", "kept").Err())
		require.Equal(t, "0", (<-messages).Payload)
		take(3)
		require.NoError(t, lua.LockForce.Run(t.Context(), b.rdb, []string{b.key("r"), key}, 4, 60_000, "publish").Err())
		require.Equal(t, "0", (<-messages).Payload)
		require.NoError(t, b.rdb.Del(t.Context(), b.key("r")).Err())
	}
}

func TestLockScriptsRejectInvalidInputWithoutWriting(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.acquire("before", 1, "first", time.Minute, "all", "ann")
	require.NoError(t, b.rdb.Del(t.Context(), b.key("fence")).Err())
	require.NoError(t, b.rdb.HSet(t.Context(), b.key("hash"), "not", "a string").Err())
	require.NoError(t, b.rdb.Set(t.Context(), b.key("string"), "not a lock", 0).Err())
	for name, call := range map[string]struct {
		script *redis.Script
		names  []string
		args   []any
	}{
		"acquire without a lock": {
			lua.LockAcquire, []string{"r", "fence"}, []any{2, 1000, "first", 1000, "all", "none", "kept"},
		},
		"acquire without a mode": {
			lua.LockAcquire, []string{"r", "fence", "bob"}, []any{2, 1000, "first", 1000, "none", "kept"},
		},
		"acquire in another mode": {
			lua.LockAcquire,
			[]string{"r", "fence", "bob"},
			[]any{2, 1000, "first", 1000, "some", "none", "kept"},
		},
		"acquire for no time": {
			lua.LockAcquire,
			[]string{"r", "fence", "bob"},
			[]any{2, 1000, "first", 0, "all", "none", "kept"},
		},
		"acquire for a fraction": {
			lua.LockAcquire,
			[]string{"r", "fence", "bob"},
			[]any{2, 1000, "first", "1.5", "all", "none", "kept"},
		},
		"acquire without a serial": {
			lua.LockAcquire,
			[]string{"r", "fence", "bob"},
			[]any{"nan", 1000, "first", 1000, "all", "none", "kept"},
		},
		"acquire with a bad receipt": {
			lua.LockAcquire,
			[]string{"hash", "fence", "bob"},
			[]any{2, 1000, "first", 1000, "all", "none", "kept"},
		},
		"acquire with a bad fence": {
			lua.LockAcquire,
			[]string{"r", "hash", "bob"},
			[]any{2, 1000, "first", 1000, "all", "none", "kept"},
		},
		"acquire a key of another type": {
			lua.LockAcquire,
			[]string{"r", "fence", "bob", "string"},
			[]any{2, 1000, "first", 1000, "each", "none", "kept"},
		},
		"release without a lock":     {lua.LockRelease, []string{"r"}, []any{2, 1000, "first", "publish", "kept"}},
		"release without an owner":   {lua.LockRelease, []string{"r", "ann"}, []any{2, 1000}},
		"release with a bad serial":  {lua.LockRelease, []string{"r", "ann"}, []any{"-1", 1000, "first", "publish", "kept"}},
		"release by another command": {lua.LockRelease, []string{"r", "ann"}, []any{2, 1000, "first", "del", "kept"}},
		"force by another command":   {lua.LockForce, []string{"r", "ann"}, []any{2, 1000, "del"}},
		"force without a serial":     {lua.LockForce, []string{"r", "ann"}, []any{"x", 1000, "publish"}},
		"renew without a lock":       {lua.LockRenew, nil, []any{1000, "kept"}},
		"renew without an owner":     {lua.LockRenew, []string{"ann"}, []any{1000, "kept"}},
		"renew for no time":          {lua.LockRenew, []string{"ann"}, []any{"0x10", "kept", "first"}},
		"renew neither way":          {lua.LockRenew, []string{"ann"}, []any{90_000, "first", "first"}},
		"release neither way":        {lua.LockRelease, []string{"r", "ann"}, []any{2, 1000, "first", "publish", "first"}},
		"acquire neither way": {
			lua.LockAcquire, []string{"r", "fence", "bob"}, []any{2, 1000, "first", 1000, "each", "none", "first"},
		},
	} {
		err := call.script.Run(t.Context(), b.rdb, b.keys(call.names...), call.args...).Err()
		require.Error(t, err, name)
		require.Equal(t, map[string]string{"first": "1"}, b.owners("ann"), name)
		require.Greater(t, b.rdb.PTTL(t.Context(), b.key("ann")).Val(), 30*time.Second, name)
		require.Zero(t, b.rdb.Exists(t.Context(), b.keys("bob", "r", "fence")...).Val(), name)
	}
}
