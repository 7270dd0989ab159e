package demo

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"stampede/internal/crowd"
)

const eraseLine = "\r\x1b[K"

// story writes what happens, line by line, and below it on a terminal a line that moves. It is safe
// for concurrent use. Errors of writing are not looked at: a demo that nobody watches is still a test.
type story struct {
	mu       sync.Mutex
	out      io.Writer
	terminal bool
	start    time.Time
}

func newStory(out io.Writer, terminal bool) *story {
	return &story{out: out, terminal: terminal, start: time.Now()}
}

// tell adds a line with the time.
func (s *story) tell(format string, a ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	_, _ = fmt.Fprintf(s.out, "%5.1f s  %s\n", time.Since(s.start).Seconds(), fmt.Sprintf(format, a...))
}

// erase removes the moving line; it needs s.mu.
func (s *story) erase() {
	if s.terminal {
		_, _ = io.WriteString(s.out, eraseLine)
	}
}

// follow shows how far the crowd has come, until it is through or ctx ends.
func (s *story) follow(ctx context.Context, buyers *crowd.Crowd) {
	every := 2 * time.Second
	if s.terminal {
		every = 100 * time.Millisecond
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	told := ""
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
			s.move(progress)
		case progress != told:
			s.tell("%s", progress)
			told = progress
		}
		if done {
			return
		}
	}
}

// move writes the moving line anew.
func (s *story) move(progress string) {
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
