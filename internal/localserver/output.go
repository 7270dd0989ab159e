package localserver

import (
	"bytes"
	"sync"
)

// outputMax bounds, in bytes, how much of a server's output is kept.
const outputMax = 64 << 10

// readyMark is in the line that either server writes when it serves, recovery included. It needs
// no port to ask at, and so cannot be taken for the answer of a stranger on our port.
const readyMark = "ready to accept connections"

// output keeps the end of what a server writes, and tells when it says that it is ready.
type output struct {
	mu    sync.Mutex
	kept  []byte
	ready chan struct{} // closed when readyMark was written
	said  bool
}

func newOutput() *output { return &output{ready: make(chan struct{})} }

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.kept = append(o.kept, p...)
	if !o.said && bytes.Contains(bytes.ToLower(o.kept), []byte(readyMark)) {
		o.said = true
		close(o.ready)
	}
	if extra := len(o.kept) - outputMax; extra > 0 {
		o.kept = append(o.kept[:0], o.kept[extra:]...)
	}
	return len(p), nil
}

// String is the end of the output.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(bytes.TrimSpace(o.kept))
}
