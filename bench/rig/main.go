// Package rig is the common base of the benchmarks of this module: a private Redis and Postgres,
// Stampede's own binary and the designs of the ladder as processes, their cost in CPU time, rounds in
// which candidates take turns, and the page with the results.
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
	figuresFolder = flag.String("figures", "",
		"`folder` of the page NAME.md, to write the figures and their plots there as well")
	only = flag.String("only", "",
		"regular `expression`: runs only candidates whose names match, for profiling or development")
)

// figures are the results of the benchmarks of this process.
var figures page.Figures

// Put adds a table to the page, or replaces the one with the same title.
func Put(t page.Table) { figures.Put(t) }

// Main is the body of a package's TestMain. If front.Env is set, it runs the front of a design instead
// of the benchmarks. The page is NAME.md in the folder of -figures. The page names the versions of the
// servers, and of modules whose paths contain one of the given names.
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
	text, plots, err := figures.Write()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if text != "" {
		text = "Measured " + time.Now().UTC().Format(time.DateOnly) + " on " + page.Machine() + ", with " +
			versions(modules) + ".\n\n" + text
		fmt.Printf("\n%s", text)
	}
	stopServers()
	removeBinary()
	if *figuresFolder != "" && text != "" && code == 0 {
		if err := writePage(name, text, plots); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func writePage(name, text string, plots map[string][]byte) error {
	for file, svg := range plots {
		if err := os.WriteFile(filepath.Join(*figuresFolder, file), svg, 0o644); err != nil {
			return err
		}
	}
	return page.Replace(filepath.Join(*figuresFolder, name+".md"), text)
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
