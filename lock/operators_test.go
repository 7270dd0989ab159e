package lock_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/lock"
)

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
