package progress_test

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/progress"
)

// screen is safe for concurrent use.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

// take returns what was written since the last call.
func (s *screen) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.text.Reset()
	return s.text.String()
}

const erase = "\r\x1b[K"

// wait lets the time of the test pass.
func wait(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestNothingIsShownOfWhatEndsSoon(t *testing.T) {
	t.Parallel()
	for _, terminal := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var s screen
			ctx, stop := progress.New(&s, terminal).Start(t.Context(), "reading")
			progress.Step(ctx, "checking")
			wait(2*time.Second - time.Millisecond)
			stop()
			wait(time.Minute)
			require.Empty(t, s.take())
		})
	}
}

func TestLinesElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s, results screen
		line := progress.New(&s, false)
		ctx, stop := line.Start(t.Context(), "reading")
		wait(2 * time.Second)
		require.Equal(t, "   2 s  reading\n", s.take())
		progress.At(ctx, 1200, 0, "orders")
		wait(9 * time.Second)
		require.Empty(t, s.take(), "the next line comes ten seconds later")
		wait(time.Second)
		require.Equal(t, "  12 s  reading: 1,200 orders\n", s.take())
		progress.Step(ctx, "checking")
		wait(10 * time.Second)
		require.Equal(t, "  22 s  checking\n", s.take(), "a step begins without figures")
		progress.At(ctx, 3, 7, "months")
		progress.Step(ctx, "checking") // the same step keeps them
		wait(10 * time.Second)
		require.Equal(t, "  32 s  checking: 3 of 7 months\n", s.take())
		require.Equal(t, &results, line.Over(&results), "nothing is on a terminal that could be in the way")
		stop()
		wait(time.Minute)
		require.Empty(t, s.take())
	})
}

func TestLineOnTerminalIsRewritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var s screen
		line := progress.New(&s, true)
		ctx, stop := line.Start(t.Context(), "reading")
		wait(2 * time.Second)
		require.Equal(t, erase+"   2 s  reading", s.take())
		progress.At(ctx, 1, 2, "sales")
		wait(200 * time.Millisecond)
		require.Equal(t, erase+"   2 s  reading: 1 of 2 sales", s.take())
		_, err := fmt.Fprintln(line.Over(&s), "a result")
		require.NoError(t, err)
		_, err = fmt.Fprintln(line.Over(&s), "another one")
		require.NoError(t, err)
		require.Equal(t, erase+"a result\nanother one\n", s.take(), "the line makes room")
		wait(200 * time.Millisecond)
		require.Equal(t, erase+"   2 s  reading: 1 of 2 sales", s.take())
		stop()
		require.Equal(t, erase, s.take(), "nothing is left of it")
	})
}

// Code without a command around it, such as that of a worker, shows nothing.
func TestNoLine(t *testing.T) {
	t.Parallel()
	progress.Step(t.Context(), "reading")
	progress.At(t.Context(), 1, 2, "sales")
	var none *progress.Line
	ctx, stop := none.Start(t.Context(), "reading")
	stop()
	require.Equal(t, context.Context(t.Context()), ctx)
	require.Nil(t, progress.From(ctx))
	var s screen
	require.Equal(t, &s, none.Over(&s))
}
