// Package progress shows what a command is doing if that takes longer than two seconds: on a terminal in one line that
// is rewritten in place, elsewhere in a line every ten seconds. The code that does the work finds the line in its
// context, and does not depend on whether anybody watches.
package progress

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"stampede/internal/format"
)

const (
	// quiet is how long nothing is shown.
	quiet = 2 * time.Second
	// rewriteEvery is the interval of updates on a terminal, and lineEvery elsewhere.
	rewriteEvery = 200 * time.Millisecond
	lineEvery    = 10 * time.Second
)

const eraseLine = "\r\x1b[K"

// Line is the line of a process. It is safe for concurrent use. A nil Line shows nothing.
type Line struct {
	w        io.Writer
	terminal bool

	mu    sync.Mutex
	began time.Time
	doing string
	n, of int64
	unit  string
	shown bool // the line is on the terminal now
}

// New returns a line on w. Terminal says that it can be rewritten there.
func New(w io.Writer, terminal bool) *Line { return &Line{w: w, terminal: terminal} }

type lineKey struct{}

// Start begins to show what is done with the context that it returns, until stop is called.
func (l *Line) Start(ctx context.Context, doing string) (_ context.Context, stop func()) {
	if l == nil {
		return ctx, func() {}
	}
	l.mu.Lock()
	l.began, l.doing, l.n, l.of, l.unit = time.Now(), doing, 0, 0, ""
	l.mu.Unlock()
	showing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var done sync.WaitGroup
	done.Go(func() { l.show(showing) })
	return context.WithValue(ctx, lineKey{}, l), func() {
		cancel()
		done.Wait()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.erase()
	}
}

// From returns the line of a context, nil if there is none.
func From(ctx context.Context) *Line {
	l, _ := ctx.Value(lineKey{}).(*Line)
	return l
}

// Step says what is done from now on.
func Step(ctx context.Context, doing string) { From(ctx).Step(doing) }

// At says how far the step is: n of so many units; of is 0 if that is not known.
func At(ctx context.Context, n, of int64, unit string) { From(ctx).At(n, of, unit) }

// Step says what is done from now on.
func (l *Line) Step(doing string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.doing != doing {
		l.doing, l.n, l.of, l.unit = doing, 0, 0, ""
	}
}

// At says how far the step is: n of so many units; of is 0 if that is not known.
func (l *Line) At(n, of int64, unit string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n, l.of, l.unit = n, of, unit
}

// Over returns a writer to w that first takes the line from the terminal, so that both do not mix. The next update
// brings the line back.
func (l *Line) Over(w io.Writer) io.Writer {
	if l == nil || !l.terminal {
		return w
	}
	return over{l, w}
}

type over struct {
	line *Line
	w    io.Writer
}

// Write implements io.Writer.
func (o over) Write(p []byte) (int, error) {
	o.line.mu.Lock()
	defer o.line.mu.Unlock()
	o.line.erase()
	return o.w.Write(p)
}

// erase takes the line from the terminal; the caller holds l.mu.
func (l *Line) erase() {
	if l.shown {
		_, _ = io.WriteString(l.w, eraseLine)
		l.shown = false
	}
}

func (l *Line) show(ctx context.Context) {
	every := lineEvery
	if l.terminal {
		every = rewriteEvery
	}
	next := time.NewTimer(quiet)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		l.mu.Lock()
		text := l.text()
		if l.terminal {
			_, _ = io.WriteString(l.w, eraseLine+text)
			l.shown = true
		} else {
			_, _ = io.WriteString(l.w, text+"\n")
		}
		l.mu.Unlock()
		next.Reset(every)
	}
}

func (l *Line) text() string {
	text := fmt.Sprintf("%4.0f s  %s", time.Since(l.began).Seconds(), l.doing)
	switch {
	case l.of > 0:
		text += fmt.Sprintf(": %s of %s %s", format.Count(l.n), format.Count(l.of), l.unit)
	case l.unit != "":
		text += fmt.Sprintf(": %s %s", format.Count(l.n), l.unit)
	}
	return text
}
