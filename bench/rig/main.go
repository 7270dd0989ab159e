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
	figuresFolder = flag.String("figures", "",
		"a `folder` with a page for the figures, NAME.md, in which they and their plots are written")
	only = flag.String("only", "",
		"a regular `expression`: only candidates whose names it finds take turns, to profile them or to work on them")
)

// figures are what the benchmarks of this process have found.
var figures page.Figures

// Put adds a table to the page, or replaces the one with the same title.
func Put(t page.Table) { figures.Put(t) }

// Main is the body of a package's TestMain. It is also the front of a design where it is told so, and
// then never returns to the benchmarks. The page is NAME.md in the folder of -figures; versions are
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
		if err := write(name, text, plots); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func write(name, text string, plots map[string][]byte) error {
	for file, svg := range plots {
		if err := os.WriteFile(filepath.Join(*figuresFolder, file), svg, 0o644); err != nil {
			return err
		}
	}
	return page.Replace(filepath.Join(*figuresFolder, name+".md"), text)
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
