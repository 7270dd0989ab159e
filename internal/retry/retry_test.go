package retry_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
)

func TestPauseEndsWithTimeOrDone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		done := make(chan struct{})
		require.True(t, retry.Pause(time.Second, done))
		require.Equal(t, time.Second, time.Since(began))

		time.AfterFunc(time.Second, func() { close(done) })
		require.False(t, retry.Pause(time.Minute, done))
		require.Equal(t, 2*time.Second, time.Since(began))
		require.False(t, retry.Pause(0, done), "already closed")
		require.True(t, retry.Pause(-time.Second, nil), "already over")
	})
}

func TestDelayDoublesWithinBounds(t *testing.T) {
	t.Parallel()
	const first, longest = 100 * time.Millisecond, 5 * time.Second
	for try, full := range map[int]time.Duration{
		1: first, 2: 2 * first, 3: 4 * first, 6: 32 * first, 7: longest, 40: longest, 1 << 40: longest,
	} {
		for range 100 {
			delay := retry.Delay(try, first, longest)
			require.LessOrEqual(t, delay, full, "try %d", try)
			require.GreaterOrEqual(t, delay, full/2-1, "try %d", try)
		}
	}
	require.Equal(t, time.Duration(1), retry.Delay(1, 1, 1))
}

func TestFlappingOutageIsLoggedAtBoundedRate(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	o := retry.Outage{Log: slog.New(slog.NewTextHandler(&log, nil)), Doing: "publish outcomes"}
	for range 135 {
		require.Positive(t, o.Failed(errors.New("i/o timeout")))
		require.True(t, o.Lasts())
		o.Over()
		require.False(t, o.Lasts())
	}
	began := strings.Count(log.String(), "cannot publish outcomes")
	ended := strings.Count(log.String(), "can publish outcomes")
	const firstLines = 5
	require.LessOrEqual(t, began, firstLines+1)
	require.Equal(t, began, ended)
}

func TestJoinSaysEachTextOnce(t *testing.T) {
	t.Parallel()
	loading, other := errors.New("LOADING"), errors.New("other")
	err := retry.Join(loading, nil, errors.New("LOADING"), other, loading)
	require.EqualError(t, err, "LOADING\nother")
	require.ErrorIs(t, err, other)
	require.NoError(t, retry.Join(nil, nil))
}
