package localserver

import (
	"bytes"
	"sync"
)

// outputMax bounds, in bytes, how much of a server's output is kept.
const outputMax = 64 << 10

// Marks in the lines that servers write when they are ready, also after recovery. Unlike a connection to the port, they
// cannot come from another process.
const (
	readyMark         = "ready to accept connections" // of Redis and Postgres
	sentinelReadyMark = "sentinel id is"
)

// output keeps the end of a server's output, and signals when the server is ready.
type output struct {
	mu      sync.Mutex
	kept    []byte
	mark    string        // of readiness, in lower case
	ready   chan struct{} // closed when mark was written
	isReady bool
}

func newOutput(mark string) *output { return &output{mark: mark, ready: make(chan struct{})} }

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.kept = append(o.kept, p...)
	if !o.isReady && bytes.Contains(bytes.ToLower(o.kept), []byte(o.mark)) {
		o.isReady = true
		close(o.ready)
	}
	if extra := len(o.kept) - outputMax; extra > 0 {
		o.kept = append(o.kept[:0], o.kept[extra:]...)
	}
	return len(p), nil
}

// String returns the end of the output.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(bytes.TrimSpace(o.kept))
}
