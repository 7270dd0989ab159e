// Package rig is the common base of the benchmarks of this module: a private Redis and Postgres,
// Stampede's own binary and the designs of the ladder as processes, their cost in CPU time, rounds in
// which candidates take turns, and the page with the results.
package rig

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"stampede/bench/designs"
	"stampede/bench/front"
)

var (
	figuresFolder = flag.String("figures", "", "`folder` of the page NAME.md, to write the figures there as well")
	only          = flag.String("only", "",
		"regular `expression`: runs only candidates whose names match, for profiling or development")
)

var (
	// figures are the results of the benchmarks of this process.
	figures page
	// measuredWith are the versions of the servers and programs that took part.
	measuredWith []string
	// atExit are called after all benchmarks, the last one first.
	atExit []func()
)

// Put adds a table to the page, or replaces the one with the same title.
func Put(t Table) { figures.put(t) }

// MeasuredWith names a server or a program and its version on the page.
func MeasuredWith(version string) { measuredWith = append(measuredWith, version) }

// AtExit has stop called after all benchmarks.
func AtExit(stop func()) { atExit = append(atExit, stop) }

// Main is the body of a package's TestMain. If front.Env is set, it runs the front of a design instead
// of the benchmarks. The page is NAME.md in the folder of -figures. The page names the versions of the
// servers, and of the modules in go.mod whose paths contain one of the given names.
func Main(m *testing.M, name string, modules ...string) {
	if os.Getenv(front.Env) != "" {
		os.Exit(front.Main(designs.Find))
	}
	flag.Parse()
	if *only != "" && *figuresFolder != "" {
		fmt.Fprintln(os.Stderr, "-figures writes pages about all candidates: it cannot be combined with -only")
		os.Exit(2)
	}
	code := m.Run()
	text := figures.markdown()
	if text != "" {
		text = "Measured " + time.Now().UTC().Format(time.DateOnly) + " on " + machine() + ", with " +
			versions(modules) + ".\n\n" + text
		fmt.Printf("\n%s", text)
	}
	for _, stop := range slices.Backward(atExit) {
		stop()
	}
	if *figuresFolder != "" && text != "" && code == 0 {
		if err := replaceFigures(filepath.Join(*figuresFolder, name+".md"), text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// Scale is the amount of something in a benchmark. A single round is a smoke run, or the warm-up before
// the rounds that count: it gets the small amount.
func Scale[T any](b testing.TB, full, single T) T {
	if isSmoke(b) {
		return single
	}
	return full
}

// isSmoke is false for tests, which have no rounds.
func isSmoke(b testing.TB) bool {
	bench, ok := b.(*testing.B)
	return ok && bench.N == 1
}
