package testkit

import (
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// Logger returns a logger that writes all levels to the test's log. After the test it discards records, because
// logging to an ended test panics.
func Logger(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(w.end)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct {
	mu    sync.Mutex
	t     testing.TB
	ended bool
}

// Write implements io.Writer.
func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.t.Log(strings.TrimSuffix(string(p), "\n"))
	}
	return len(p), nil
}

func (w *testWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}
