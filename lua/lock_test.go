package lua_test

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/lua"
)

// lockBench runs the scripts of the lock and collects their answers.
type lockBench struct {
	t    *testing.T
	rdb  *redis.Client
	key  func(user string) string
	said []string
}

func newLockBench(t *testing.T) *lockBench {
	t.Helper()
	keys := testkit.Keys(t)
	return &lockBench{t: t, rdb: testkit.Redis(t), key: func(user string) string { return keys.Lock(0, user) }}
}

func (b *lockBench) run(script *redis.Script, keys []string, args ...any) []string {
	b.t.Helper()
	answers, err := script.Run(b.t.Context(), b.rdb, keys, args...).StringSlice()
	require.NoError(b.t, err)
	b.said = append(b.said, answers...)
	return answers
}

func (b *lockBench) owners(user string) map[string]string {
	b.t.Helper()
	owners, err := b.rdb.HGetAll(b.t.Context(), b.key(user)).Result()
	require.NoError(b.t, err)
	return owners
}

// everyAnswerWasHeard holds what the script said against what its header promises.
func (b *lockBench) everyAnswerWasHeard(script string) {
	b.t.Helper()
	slices.Sort(b.said)
	require.ElementsMatch(b.t, readHeader(b.t, script).answers, slices.Compact(b.said))
}

func TestLockAcquireGivesEveryAnswerOfItsHeaderAndTheSameToARepeat(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	keys := []string{b.key("ann"), b.key("bob"), b.key("cid")}
	require.Equal(t, []string{"held"}, b.run(lua.LockAcquire, keys[:1], "first", 60_000, 1))
	for range 3 {
		require.Equal(t, []string{"held", "held", "lost"}, b.run(lua.LockAcquire, keys, "first", 60_000, 2, 1, 2))
		require.Equal(t, []string{"busy", "busy", "held"}, b.run(lua.LockAcquire, keys, "second", 60_000, 1, 1, 1))
		require.Equal(t, map[string]string{"first": "2"}, b.owners("ann"))
		require.Equal(t, map[string]string{"first": "1"}, b.owners("bob"))
		require.Equal(t, map[string]string{"second": "1"}, b.owners("cid"))
	}
	b.everyAnswerWasHeard("lock_acquire")
}

func TestLockReleaseGivesEveryAnswerOfItsHeaderAndTheSameToARepeat(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	locks := []string{b.key("ann"), b.key("bob"), b.key("cid")}
	b.run(lua.LockAcquire, locks[:2], "first", 60_000, 1, 1)
	b.run(lua.LockAcquire, locks[1:2], "first", 60_000, 2)
	b.run(lua.LockAcquire, locks[2:], "second", 60_000, 1)
	b.said = nil
	for range 3 {
		release := append([]string{b.key("receipt")}, locks...)
		require.Equal(t, []string{"released", "kept", "lost"}, b.run(lua.LockRelease, release, "first", 60_000, 0, 1, 0))
		require.Empty(t, b.owners("ann"))
		require.Equal(t, map[string]string{"first": "1"}, b.owners("bob"))
		require.Equal(t, map[string]string{"second": "1"}, b.owners("cid"))
	}
	b.everyAnswerWasHeard("lock_release")
}

func TestLockScriptsRefuseBadInputWithoutWritingAnything(t *testing.T) {
	t.Parallel()
	b := newLockBench(t)
	b.run(lua.LockAcquire, []string{b.key("ann")}, "first", 60_000, 1)
	for name, call := range map[string]struct {
		script *redis.Script
		users  []string
		args   []any
	}{
		"acquire without a key":     {lua.LockAcquire, nil, []any{"first", 1000}},
		"acquire without a depth":   {lua.LockAcquire, []string{"ann", "bob"}, []any{"first", 1000, 2}},
		"acquire with one too many": {lua.LockAcquire, []string{"ann"}, []any{"first", 1000, 2, 1}},
		"acquire for no time":       {lua.LockAcquire, []string{"ann", "bob"}, []any{"first", 0, 1, 1}},
		"acquire for a fraction":    {lua.LockAcquire, []string{"bob", "ann"}, []any{"first", "1.5", 1, 2}},
		"acquire to no depth":       {lua.LockAcquire, []string{"bob", "ann"}, []any{"first", 1000, 1, 0}},
		"acquire to nan":            {lua.LockAcquire, []string{"bob", "ann"}, []any{"first", 1000, 1, "nan"}},
		"release without a lock":    {lua.LockRelease, []string{"receipt"}, []any{"first", 1000}},
		"release without a depth":   {lua.LockRelease, []string{"receipt", "ann", "bob"}, []any{"first", 1000, 0}},
		"release to below 0":        {lua.LockRelease, []string{"receipt", "ann"}, []any{"first", 1000, -1}},
	} {
		keys := make([]string, len(call.users))
		for i, user := range call.users {
			keys[i] = b.key(user)
		}
		err := call.script.Run(t.Context(), b.rdb, keys, call.args...).Err()
		require.ErrorContains(t, err, "ERR ", name)
		require.Equal(t, map[string]string{"first": "1"}, b.owners("ann"), name)
		require.Greater(t, b.rdb.PTTL(t.Context(), b.key("ann")).Val(), 30*time.Second, name)
		require.Zero(t, b.rdb.Exists(t.Context(), b.key("bob"), b.key("receipt")).Val(), name)
	}
}
