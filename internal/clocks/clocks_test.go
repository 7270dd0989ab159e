package clocks_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/clocks"
)

// at reads a clock that is ahead of this process, and is read within this time each way.
func at(t *testing.T, ahead, way time.Duration) clocks.Reading {
	t.Helper()
	r, err := clocks.Read(func() (time.Time, error) {
		<-time.After(way)
		now := time.Now().Add(ahead)
		<-time.After(way)
		return now, nil
	})
	require.NoError(t, err)
	return r
}

func TestReadTakesHalfTheRoundTripOff(t *testing.T) {
	t.Parallel()
	const way = 100 * time.Millisecond
	far := at(t, 3*time.Second, way)
	assert.GreaterOrEqual(t, far.Margin, way)
	own := clocks.Own()
	assert.InDelta(t, 3*time.Second, far.Offset-own.Offset, float64(far.Margin), "it was read on the way")
	assert.LessOrEqual(t, far.Ahead(own), 3*time.Second, "it is ahead by this at least")
	assert.Greater(t, far.Ahead(own), 3*time.Second-2*far.Margin-time.Millisecond)
	assert.Equal(t, -far.Ahead(own), own.Ahead(far))
	assert.Zero(t, at(t, way/2, way).Ahead(own), "a round trip hides it")
	assert.Zero(t, at(t, -way/2, way).Ahead(own))
	_, err := clocks.Read(func() (time.Time, error) { return time.Time{}, errors.ErrUnsupported })
	assert.ErrorIs(t, err, errors.ErrUnsupported)
}

func TestClocksAgreeUpToOneSecond(t *testing.T) {
	t.Parallel()
	own := clocks.Own()
	times, err := clocks.Agree(own, at(t, 900*time.Millisecond, 0), at(t, -50*time.Millisecond, 0))
	require.NoError(t, err)
	now := time.Now()
	assert.WithinDuration(t, now.Add(-50*time.Millisecond), times.Earliest, 40*time.Millisecond)
	assert.WithinDuration(t, now.Add(900*time.Millisecond), times.Latest, 40*time.Millisecond)

	for _, ahead := range []time.Duration{1100 * time.Millisecond, -1100 * time.Millisecond} {
		_, err = clocks.Agree(own, own, at(t, ahead, 0))
		assert.ErrorIs(t, err, clocks.ErrApart, "%v", ahead)
	}
	// A slow reading proves nothing, and does not hide what the others prove.
	slow := clocks.Reading{Offset: 5 * time.Second, Margin: 10 * time.Second}
	_, err = clocks.Agree(own, slow)
	assert.NoError(t, err)
	_, err = clocks.Agree(own, slow, at(t, 2*time.Second, 0))
	assert.ErrorIs(t, err, clocks.ErrApart)
}
