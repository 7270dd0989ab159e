package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLoggerWritesFormatAndLevel(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, formatText, "WARN")
	require.NoError(t, err)
	log.Info("hidden")
	log.Warn("shown", "order", 7)
	assert.NotContains(t, out.String(), "hidden")
	assert.Contains(t, out.String(), "level=WARN msg=shown order=7\n")

	out.Reset()
	log, err = NewLogger(&out, formatJSON, "debug")
	require.NoError(t, err)
	log.Debug("shown", "order", 7)
	var record map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &record))
	assert.Equal(t, "shown", record["msg"])
	assert.EqualValues(t, 7, record["order"])
}

func TestNewLoggerRejectsUnknownFormatAndLevel(t *testing.T) {
	_, err := NewLogger(nil, "xml", "info")
	assert.EqualError(t, err, `log format "xml": want text or json`)
	_, err = NewLogger(nil, formatText, "loud")
	assert.EqualError(t, err, `log level "loud": want debug, info, warn or error`)
}

// traced is an error with a stack, as in some libraries.
type traced struct{}

func (traced) Error() string { return "i/o timeout" }

func (traced) Format(f fmt.State, verb rune) {
	_, _ = io.WriteString(f, "i/o timeout")
	if verb == 'v' && f.Flag('+') {
		_, _ = io.WriteString(f, "\nmain.publish\n\t/src/main.go:7")
	}
}

func TestLoggerWritesOnlyMessageOfError(t *testing.T) {
	for _, format := range []string{formatText, formatJSON} {
		var out bytes.Buffer
		log, err := NewLogger(&out, format, "info")
		require.NoError(t, err)
		log.Error("failed", "error", traced{}, slog.Group("of", "cause", fmt.Errorf("publish: %w", error(traced{}))))
		assert.Contains(t, out.String(), "i/o timeout")
		assert.NotContains(t, out.String(), "main.go", "no stack")
		assert.Equal(t, 1, strings.Count(out.String(), "\n"))
	}
}

// gate is a reader of lines that can be slow: a write waits until it is open.
type gate struct {
	open chan struct{}

	mu   sync.Mutex
	fail int // so many writes
	text strings.Builder
	most int // bytes in a write
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.mu.Lock()
	defer g.mu.Unlock()
	g.most = max(g.most, len(p))
	if g.fail > 0 {
		g.fail--
		n, _ := g.text.Write(p[:len(p)/2])
		return n, errors.New("no space left on device")
	}
	return g.text.Write(p)
}

func TestStderrKeepsOrderAndLosesNothingWhileThereIsRoom(t *testing.T) {
	t.Parallel()
	g := &gate{open: make(chan struct{})}
	s := NewStderr(g)
	var want strings.Builder
	for n := range 10_000 {
		line := fmt.Sprintf("line %d\n", n)
		want.WriteString(line)
		_, err := s.Write([]byte(line))
		require.NoError(t, err)
	}
	long := strings.Repeat("x", 2*pieceMax) + "\n"
	want.WriteString(long)
	_, _ = io.WriteString(s, long)
	close(g.open)
	s.Close()
	require.Equal(t, want.String(), g.text.String())
	require.Equal(t, len(long), g.most, "longer than a piece only for a line that is")
}

// Lines that nobody reads are lost when there is no more room. The place says how many.
func TestStderrDropsAndCounts(t *testing.T) {
	t.Parallel()
	g := &gate{open: make(chan struct{})}
	s := NewStderr(g)
	s.SetFormat(formatJSON)
	line := strings.Repeat("x", 1023) + "\n"
	before := linesLost.Load()
	const written = 3 * waitingMax / 1024
	for range written {
		_, _ = io.WriteString(s, line) // does not wait
	}
	lost := linesLost.Load() - before
	require.GreaterOrEqual(t, lost, int64(written/3-1), "what is being written and what waits is bounded")
	s.Close() // neither does a stop, for long
	require.Empty(t, g.text.String())
	_, _ = io.WriteString(s, "after the end\n")

	close(g.open)
	<-s.done
	kept := strings.Count(g.text.String(), line)
	require.Less(t, kept, written)
}

func TestStderrSaysHowManyLinesWereLost(t *testing.T) {
	t.Parallel()
	g := &gate{open: make(chan struct{})}
	close(g.open)
	s := &Stderr{to: g, wake: make(chan struct{}, 1), format: formatJSON}
	shown := func(lines ...string) string {
		g.text.Reset()
		for _, line := range lines {
			_, _ = io.WriteString(s, line+"\n")
		}
		s.flush()
		return g.text.String()
	}
	g.fail = 1
	require.Equal(t, "a\n123", shown("a", "12345678"), "the disk is full")
	g.fail = 2 // the line about the lost one as well
	shown("two")
	require.Regexp(t, `^\n\{"time":"[^"]*","level":"WARN","msg":"lines of this log were lost.*","lines":2\}\nnext\n$`,
		shown("next"))

	long := strings.Repeat("x", waitingMax-1)
	require.Equal(t, long+"\n", shown(long, "lost", "lost", "lost"))
	s.SetFormat(formatText)
	require.Regexp(t, ` level=WARN msg="lines of this log were lost here.*" lines=3\nnext\n$`, shown("next"))
	require.Equal(t, "and no more\n", shown("and no more"))
}

// A pipe without a reader is an error, and does not end the process, also under the numbers 1 and 2.
func TestUnbrokenWritesUnderAnotherNumber(t *testing.T) {
	t.Parallel()
	require.Greater(t, Unbroken(os.Stderr).(*os.File).Fd(), uintptr(2))
	var other strings.Builder
	require.Equal(t, io.Writer(&other), Unbroken(&other))
}
