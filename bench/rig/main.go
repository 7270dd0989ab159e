// Package rig is what the benchmarks of this module stand on: a private Redis and Postgres, the
// product's own binary and the designs of the ladder as processes, what they cost in CPU time, rounds
// in which candidates take turns, and the page with what was found.
package rig

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"stampede/bench/designs"
	"stampede/bench/front"
	"stampede/bench/page"
)

var (
	figuresFolder = flag.String("figures", "", "a `folder` with a page for the figures, NAME.md, in which they and their plots are written")
	only          = flag.String("only", "", "a regular `expression`: only candidates whose names it finds take turns, to profile them or to work on them")
)

// report is what the benchmarks of this process have found.
var report struct {
	figures page.Figures
	plots   map[string][]byte // by file name
}

// Put adds a table to the page, or replaces the one with the same title.
func Put(t page.Table) { report.figures.Put(t) }

// PutWithPlot adds a table with a plot of it, an SVG that is written into the file of that name; nil is no plot.
func PutWithPlot(t page.Table, file string, svg []byte) {
	if svg == nil {
		Put(t)
		return
	}
	t.Plot = file
	if report.plots == nil {
		report.plots = make(map[string][]byte)
	}
	report.plots[file] = svg
	Put(t)
}

// Main is the body of a package's TestMain. It is also the front of a design where it is told so, and
// then never returns to the benchmarks. The page is page.md in the folder of -figures; versions are
// told of the modules whose paths contain one of the names, beside those of the servers.
func Main(m *testing.M, name string, modules ...string) {
	if os.Getenv(front.Env) != "" {
		os.Exit(front.Main(designs.Find))
	}
	flag.Parse()
	if *only != "" && *figuresFolder != "" {
		fmt.Fprintln(os.Stderr, "-figures writes pages about all candidates: leave out -only")
		os.Exit(2)
	}
	code := m.Run()
	text := report.figures.Markdown()
	if text != "" {
		text = "Measured " + time.Now().UTC().Format(time.DateOnly) + " on " + page.Machine() + ", with " +
			versions(modules) + ".\n\n" + text
		fmt.Printf("\n%s", text)
	}
	stopServers()
	removeBinary()
	if *figuresFolder != "" && text != "" && code == 0 {
		if err := write(filepath.Join(*figuresFolder, name+".md"), text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func write(path, text string) error {
	for name, svg := range report.plots {
		if err := os.WriteFile(filepath.Join(*figuresFolder, name), svg, 0o644); err != nil {
			return err
		}
	}
	return page.Replace(path, text)
}

// Scale is how much of something a benchmark does. A single round is a smoke of the benchmark, or its
// warm-up before the rounds that count: it makes do with little.
func Scale[T any](b *testing.B, full, single T) T {
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
