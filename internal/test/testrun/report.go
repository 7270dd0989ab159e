package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action, Package, ImportPath, Test, Output, FailedBuild string
	Elapsed                                                float64 // seconds
}

// skippedPrefix begins the line of a test that skips a part because a program is missing. The line is printed even if
// all tests pass.
const skippedPrefix = "NOT "

// report prints a run from its events.
type report struct {
	out   io.Writer
	total int
	began time.Time

	mu       sync.Mutex
	printed  time.Time // the time of the latest output
	packages map[string]*packageRun
	builds   map[string][]string // output of the compiler, by import path
	ended    int
	failures []string
}

// packageRun is a running package.
type packageRun struct {
	done int
	// output holds the lines of each test that has not passed, by name; "" is the package itself.
	output map[string][]string
	// order holds the names in the order of their first output.
	order []string
}

func newReport(out io.Writer, total int) *report {
	now := time.Now()
	return &report{
		out: out, total: total, began: now, printed: now, packages: map[string]*packageRun{}, builds: map[string][]string{},
	}
}

// read prints the events until their end. After a time without output it prints the running packages.
func (r *report) read(events io.Reader, quiet time.Duration) error {
	stop := make(chan struct{})
	var ticking sync.WaitGroup
	ticking.Go(func() {
		ticker := time.NewTicker(max(quiet/10, time.Millisecond))
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case now := <-ticker.C:
				r.printRunning(now, quiet)
			}
		}
	})
	lines := bufio.NewReader(events)
	var err error
	for err == nil {
		var line []byte
		if line, err = lines.ReadBytes('\n'); len(line) > 0 {
			r.line(line)
		}
	}
	close(stop)
	ticking.Wait()
	r.summarize()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (r *report) line(line []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e event
	if json.Unmarshal(line, &e) != nil { // plain output of the go command
		r.printf("%s", line)
		return
	}
	if e.ImportPath != "" { // an event of the compiler
		if e.Action == "build-output" {
			r.builds[e.ImportPath] = append(r.builds[e.ImportPath], e.Output)
		}
		return
	}
	p := r.packages[e.Package]
	if p == nil {
		p = &packageRun{output: map[string][]string{}}
		r.packages[e.Package] = p
	}
	switch {
	case e.Action == "output" && strings.HasPrefix(e.Output, skippedPrefix):
		r.printf("%s", e.Output)
	case e.Action == "output":
		p.add(e.Test, e.Output)
	case e.Test == "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
		r.end(p, e)
	case e.Action == "pass" || e.Action == "skip":
		delete(p.output, e.Test)
		p.done++
	}
}

func (p *packageRun) add(test, output string) {
	if _, seen := p.output[test]; !seen {
		p.order = append(p.order, test)
	}
	p.output[test] = append(p.output[test], output)
}

// end prints the line of a package, and below it the logs of its failed tests.
func (r *report) end(p *packageRun, e event) {
	delete(r.packages, e.Package)
	result := map[string]string{"pass": "ok", "fail": "FAIL"}[e.Action]
	if result == "" { // no tests
		return
	}
	if slices.ContainsFunc(p.output[""], func(line string) bool { return strings.Contains(line, "(cached)") }) {
		result += " (cached)"
	}
	r.ended++
	r.printf("%*d/%d  %s  %s %s  %.1f s\n", len(fmt.Sprint(r.total)), r.ended, r.total, r.elapsed(), result, e.Package,
		e.Elapsed)
	if e.Action == "pass" {
		return
	}
	for _, line := range r.builds[e.FailedBuild] {
		r.printf("%s", line)
	}
	failed := 0
	for _, test := range p.order {
		lines, ran := p.output[test]
		if test == "" || !ran {
			continue
		}
		if failed++; !strings.Contains(test, "/") {
			r.failures = append(r.failures, e.Package+" "+test)
		}
		for _, line := range lines {
			if !isRedundant(line) {
				r.printf("%s", line)
			}
		}
	}
	if failed == 0 {
		r.failures = append(r.failures, e.Package)
	}
	for _, line := range p.output[""] {
		if !isRedundant(line) {
			r.printf("%s", line)
		}
	}
}

// isRedundant reports whether a line only names a test, or repeats the result of the package.
func isRedundant(line string) bool {
	for _, prefix := range []string{"=== ", "FAIL\t", "FAIL\n", "ok  \t", "PASS\n", "exit status"} {
		if strings.HasPrefix(line, prefix) {
			return true
		}
	}
	return false
}

// printRunning prints the running packages, after a time without output.
func (r *report) printRunning(now time.Time, quiet time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.printed) < quiet || len(r.packages) == 0 {
		return
	}
	var running []string
	for _, name := range slices.Sorted(maps.Keys(r.packages)) {
		running = append(running, fmt.Sprintf("%s (%d tests done)", name, r.packages[name].done))
	}
	r.printf("%*s  %s  running: %s\n", 2*len(fmt.Sprint(r.total))+1, "", r.elapsed(), strings.Join(running, ", "))
}

func (r *report) summarize() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failures) == 0 {
		return
	}
	r.printf("\nFailed after %s:\n", r.elapsed())
	for _, failure := range r.failures {
		r.printf("  %s\n", failure)
	}
}

func (r *report) elapsed() string {
	seconds := int(time.Since(r.began).Seconds())
	return fmt.Sprintf("%d:%02d", seconds/60, seconds%60)
}

func (r *report) printf(format string, args ...any) {
	r.printed = time.Now()
	_, _ = fmt.Fprintf(r.out, format, args...) // a failure of standard output cannot be reported
}
