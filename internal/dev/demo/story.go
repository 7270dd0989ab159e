package demo

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"stampede/internal/dev/crowd"
)

const eraseLine = "\r\x1b[K"

// story prints what happens, line by line, and on a terminal a progress line below. It is safe for
// concurrent use. Write errors are ignored: a demo without readers is still a test.
type story struct {
	mu       sync.Mutex
	out      io.Writer
	terminal bool
	start    time.Time
}

func newStory(out io.Writer, terminal bool) *story {
	return &story{out: out, terminal: terminal, start: time.Now()}
}

// add prints a line with the time.
func (s *story) add(format string, a ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	_, _ = fmt.Fprintf(s.out, "%5.1f s  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, a...))
}

// erase removes the progress line; the caller holds s.mu.
func (s *story) erase() {
	if s.terminal {
		_, _ = io.WriteString(s.out, eraseLine)
	}
}

// follow shows the progress of the crowd until the crowd or ctx ends.
func (s *story) follow(ctx context.Context, buyers *crowd.Crowd) {
	every := 2 * time.Second
	if s.terminal {
		every = 100 * time.Millisecond
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	last := ""
	for {
		done := false
		select {
		case <-tick.C:
		case <-buyers.Done():
			done = true
		case <-ctx.Done():
			return
		}
		progress := buyers.Progress().String()
		switch {
		case s.terminal && !done:
			s.rewrite(progress)
		case progress != last:
			s.add("%s", progress)
			last = progress
		}
		if done {
			return
		}
	}
}

// rewrite replaces the progress line.
func (s *story) rewrite(progress string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = fmt.Fprintf(s.out, "%s%5.1f s  %s", eraseLine, time.Since(s.start).Seconds(), progress)
}

// report prints the crowd's figures.
func (s *story) report(r crowd.Report) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	if _, err := fmt.Fprintln(s.out); err != nil {
		return err
	}
	if err := r.WriteText(s.out); err != nil {
		return err
	}
	_, err := fmt.Fprintln(s.out)
	return err
}
