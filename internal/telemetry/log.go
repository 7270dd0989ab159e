// Package telemetry provides a process's logs, metrics, health checks and build version.
package telemetry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mattn/go-isatty"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"
)

// The formats of a log.
const (
	formatText = "text"
	formatJSON = "json"
)

// NewLogger returns a logger that writes to w, one line per record, in the format text or json. Level
// is the lowest level to write: debug, info, warn or error, in upper or lower case.
func NewLogger(w io.Writer, format, level string) (*slog.Logger, error) {
	var lowest slog.Level
	if err := lowest.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: lowest, ReplaceAttr: plain}
	switch format {
	case formatText:
		return slog.New(withTrace{slog.NewTextHandler(w, options)}), nil
	case formatJSON:
		return slog.New(withTrace{slog.NewJSONHandler(w, options)}), nil
	}
	return nil, fmt.Errorf("log format %q: want %s or %s", format, formatText, formatJSON)
}

// plain writes an error as its message: the text format would write the stack of some errors. It leaves out the
// trace of what is not traced.
func plain(_ []string, a slog.Attr) slog.Attr {
	if a.Key == traceID && a.Value.String() == "" {
		return slog.Attr{}
	}
	if err, ok := a.Value.Any().(error); ok {
		a.Value = slog.StringValue(err.Error())
	}
	return a
}

// traceID is the field with the id of a trace.
const traceID = "trace_id"

// withTrace adds the id of the trace to what is logged with its context.
type withTrace struct{ slog.Handler }

// Handle implements slog.Handler.
func (h withTrace) Handle(ctx context.Context, record slog.Record) error {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		record.AddAttrs(slog.String(traceID, span.SpanContext().TraceID().String()))
	}
	return h.Handler.Handle(ctx, record)
}

// WithAttrs implements slog.Handler.
func (h withTrace) WithAttrs(attrs []slog.Attr) slog.Handler {
	return withTrace{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h withTrace) WithGroup(name string) slog.Handler { return withTrace{h.Handler.WithGroup(name)} }

const (
	// waitingMax bounds the text that waits to be written: some thousand lines.
	waitingMax = 1 << 20
	// pieceMax is what a pipe takes in one piece (PIPE_BUF), so that lines of processes with the same pipe do not mix.
	pieceMax = 4 << 10
	// flushTimeout bounds how long a stop waits for the reader.
	flushTimeout = 2 * time.Second
)

// linesLost counts the lines of this process that nobody will read (stampede_log_lines_lost_total).
var linesLost atomic.Int64

// Stderr is a standard error that cannot stop its process: a reader that is slow or has gone, or a full disk, costs
// lines only. They are counted, and the next line that is written follows one with their number. It is safe for
// concurrent use.
type Stderr struct {
	to io.Writer
	// atOnce: a terminal shows standard output as well, in the order in which both were written.
	atOnce bool
	wake   chan struct{} // has room for one signal
	done   chan struct{}

	mu      sync.Mutex
	waiting []byte
	written []byte // the buffer of the text before
	dropped int    // lines that came after the waiting ones
	closed  bool
	format  string // of the log

	// Of the goroutine that writes: the lines that were lost before the next one, and whether a line was written in part.
	lost int
	torn bool
}

// NewStderr returns a Stderr that writes to w. It needs a Close.
func NewStderr(w io.Writer) *Stderr {
	s := &Stderr{to: Unbroken(w), wake: make(chan struct{}, 1), done: make(chan struct{}), format: formatText}
	s.atOnce = isatty.IsTerminal(s.Fd())
	go func() {
		defer close(s.done)
		for range s.wake {
			s.flush()
		}
		s.flush()
	}()
	return s
}

// Unbroken returns w, or if it is a file the same one under another number: the runtime of Go ends a process that
// writes to a pipe without a reader under the numbers 1 and 2. Under another one the write returns an error.
func Unbroken(w io.Writer) io.Writer {
	f, isFile := w.(*os.File)
	if !isFile {
		return w
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return w
	}
	copied := -1
	_ = conn.Control(func(fd uintptr) { copied, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) })
	if err != nil || copied < 0 {
		return w
	}
	return os.NewFile(uintptr(copied), f.Name())
}

// Fd is the number of the file behind it, or none.
func (s *Stderr) Fd() uintptr {
	if f, isFile := s.to.(*os.File); isFile {
		return f.Fd()
	}
	return ^uintptr(0)
}

// SetFormat sets the format of lines about lost ones: text or json.
func (s *Stderr) SetFormat(format string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.format = format
}

// Write takes one or more lines. It waits only for a terminal, and else never fails.
func (s *Stderr) Write(p []byte) (int, error) {
	if s.atOnce {
		return s.to.Write(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.dropped > 0 || len(s.waiting) > 0 && len(s.waiting)+len(p) > waitingMax {
		s.dropped += countLost(p)
		return len(p), nil
	}
	s.waiting = append(s.waiting, p...)
	select {
	case s.wake <- struct{}{}:
	default: // it has been told
	}
	return len(p), nil
}

// Close writes what waits, for at most flushTimeout.
func (s *Stderr) Close() {
	s.mu.Lock()
	s.closed = true
	close(s.wake)
	s.mu.Unlock()
	select {
	case <-s.done:
	case <-time.After(flushTimeout):
	}
}

// flush writes what waits.
func (s *Stderr) flush() {
	s.mu.Lock()
	text, dropped, format := s.waiting, s.dropped, s.format
	s.waiting, s.written, s.dropped = s.written[:0], text, 0
	s.mu.Unlock()
	defer func() { s.lost += dropped }()
	if len(text) == 0 {
		return
	}
	if s.lost > 0 && len(s.write(lossOf(s.lost, format))) == 0 {
		s.lost = 0
	}
	for len(text) > 0 {
		piece := text[:endOfPiece(text)]
		if rest := s.write(piece); len(rest) > 0 {
			s.lost += countLost(rest)
		}
		text = text[len(piece):]
	}
}

// write writes whole lines, behind the rest of one that was written in part. It returns what it could not write.
func (s *Stderr) write(lines []byte) (rest []byte) {
	if s.torn {
		lines = append([]byte{'\n'}, lines...)
	}
	n, err := s.to.Write(lines)
	if err == nil {
		s.torn = false
		return nil
	}
	if n > 0 {
		s.torn = lines[n-1] != '\n'
	}
	return lines[n:]
}

// endOfPiece returns the end of the last line that ends within pieceMax, or of a longer one.
func endOfPiece(text []byte) int {
	if len(text) <= pieceMax {
		return len(text)
	}
	if last := bytes.LastIndexByte(text[:pieceMax], '\n'); last >= 0 {
		return last + 1
	}
	if first := bytes.IndexByte(text, '\n'); first >= 0 {
		return first + 1
	}
	return len(text)
}

func countLost(p []byte) int {
	lines := max(1, bytes.Count(p, []byte{'\n'}))
	linesLost.Add(int64(lines))
	return lines
}

// lossOf returns the line about lost ones.
func lossOf(lines int, format string) []byte {
	var line bytes.Buffer
	if logger, err := NewLogger(&line, format, "warn"); err == nil {
		logger.Warn("lines of this log were lost here: its reader was too slow or had gone, or its disk was full",
			"lines", lines)
	}
	return line.Bytes()
}
