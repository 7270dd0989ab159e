package demo

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/internal/dev/loadgen"
	"stampede/internal/format"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/upkeep/audit"
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
func (s *story) follow(ctx context.Context, buyers *loadgen.Crowd) {
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
func (s *story) report(r loadgen.Report) error {
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

// Verdict is what the audit and the crowd found.
type Verdict struct {
	Sale uuid.UUID `json:"sale_id"`
	// Kept is whether every promise was checked and kept.
	Kept     bool               `json:"kept"`
	Promises []Promise          `json:"promises"`
	Crowd    loadgen.Report     `json:"crowd"`
	Checked  loadgen.Comparison `json:"checked"`
}

// Promise is one promise of the verdict, with its figures or what breaks it.
type Promise struct {
	Name    string   `json:"name"`
	Says    string   `json:"says"`
	Figures string   `json:"figures"`
	Broken  []string `json:"broken,omitempty"`
	// Unchecked lists why it could not be checked completely.
	Unchecked []string `json:"unchecked,omitempty"`
}

// judge audits the sale after the crowd, adds the comparison, and prints the verdict.
func (d *demo) judge(ctx context.Context, report loadgen.Report, comparison loadgen.Comparison) error {
	store := reservation.NewStore(d.redis, d.keys, reservation.StoreOptions{})
	defer store.Close()
	audited, err := audit.Run(ctx, audit.Config{
		Catalog: catalog.New(d.pool, store), Wait: arrivalPatience, Sale: d.sale,
	})
	if err != nil {
		return err
	}
	var lines []Promise
	for _, p := range audited.Promises {
		l := Promise{Name: p.Name, Says: p.Says, Figures: audited.Figures(p.Name), Unchecked: p.Unchecked}
		for _, f := range p.Findings {
			l.Broken = append(l.Broken, f.String())
		}
		switch p.Name {
		case "S2":
			l.Figures += fmt.Sprintf("; of %s double clicks none bought twice", format.Count(report.SecondClicks))
			if comparison.Contradictions > 0 {
				l.Broken = append(l.Broken, fmt.Sprintf("%d buyers got more than one order", comparison.Contradictions))
			}
		case "S5":
			l.Figures = d.crashFigures(comparison)
			l.Broken = append(l.Broken, lost(report, comparison)...)
		case "S7", "S8", "DB":
			if p.Kept() {
				continue // the demo does not show these; report them only if they are not kept
			}
		}
		lines = append(lines, l)
	}
	err = d.story.verdict(lines)
	if d.config.Verdict != nil {
		err = cmp.Or(d.config.Verdict(Verdict{d.sale, err == nil, lines, report, comparison}), err)
	}
	return err
}

// crashFigures returns the figures that show that the killed worker lost no order.
func (d *demo) crashFigures(c loadgen.Comparison) string {
	return fmt.Sprintf("kill -9 with %s pending orders; %s accepted, %s found in Postgres, one by one",
		format.Count(d.crash.orphans), format.Count(c.Accepted), format.Count(c.Found))
}

// lost lists the broken promises to the crowd.
func lost(report loadgen.Report, c loadgen.Comparison) (broken []string) {
	if !c.Holds() {
		broken = append(append(broken, c.String()), c.Examples...)
	}
	if c.Refused > 0 {
		broken = append(broken, fmt.Sprintf("%d orders were accepted and refused later", c.Refused))
	}
	if c.Voided > 0 {
		broken = append(broken, fmt.Sprintf("%d orders were accepted and voided, though Redis was not lost", c.Voided))
	}
	for problem, n := range report.Failures {
		broken = append(broken, fmt.Sprintf("%d clicks ended without a valid answer: %s", n, problem))
	}
	return broken
}

// verdict prints the lines. It returns ErrBroken if a promise is broken, and otherwise ErrUnchecked if
// one could not be checked.
func (s *story) verdict(lines []Promise) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for _, l := range lines {
		mark := "✓"
		switch {
		case len(l.Broken) > 0:
			mark, err = "✗", ErrBroken
		case len(l.Unchecked) > 0:
			mark, err = "?", cmp.Or(err, ErrUnchecked)
		}
		_, _ = fmt.Fprintf(s.out, "%s %s  %-34s %s\n", mark, l.Name, l.Says, l.Figures)
		for _, b := range l.Broken {
			_, _ = fmt.Fprintf(s.out, "      - %s\n", b)
		}
		for _, why := range l.Unchecked {
			_, _ = fmt.Fprintf(s.out, "      ? not checked: %s\n", format.Printable(why))
		}
	}
	_, _ = io.WriteString(s.out, map[error]string{
		nil: "\nEvery promise was kept.\n", ErrBroken: "\nA PROMISE IS BROKEN.\n",
		ErrUnchecked: "\nNOT EVERY PROMISE COULD BE CHECKED.\n",
	}[err])
	return err
}
