// Package page formats the results of benchmarks as tables and plots, and writes them into the pages of
// docs/bench.
package page

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"
)

// Table is a result of a benchmark for human readers.
type Table struct {
	Title string
	// Note is printed above the table and says what was measured.
	Note string
	Head []string
	Rows [][]string
	// Plot is the file name of the picture, beside the page, drawn as Chart says; "" means no picture.
	Plot  string
	Chart *Chart
}

// Figures collects the tables of a run. It is safe for concurrent use.
type Figures struct {
	mu     sync.Mutex
	tables []Table
}

// Put adds a table, or replaces the one with the same title: the go command runs a benchmark once
// before it runs it with the requested number of rounds.
func (f *Figures) Put(t Table) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := slices.IndexFunc(f.tables, func(have Table) bool { return have.Title == t.Title }); i >= 0 {
		f.tables[i] = t
		return
	}
	f.tables = append(f.tables, t)
}

// Write returns all tables as Markdown, in the order of their first Put, and draws their charts.
func (f *Figures) Write() (markdown string, plots map[string][]byte, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out strings.Builder
	plots = map[string][]byte{}
	for _, t := range f.tables {
		fmt.Fprintf(&out, "### %s\n\n%s\n\n", t.Title, t.Note)
		separator := slices.Repeat([]string{"---"}, len(t.Head))
		for _, row := range slices.Concat([][]string{t.Head, separator}, t.Rows) {
			fmt.Fprintf(&out, "| %s |\n", strings.Join(row, " | "))
		}
		out.WriteString("\n")
		if t.Chart == nil {
			continue
		}
		picture, err := t.draw()
		if err != nil {
			return "", nil, err
		}
		if picture == nil { // -only excluded all of it
			continue
		}
		plots[t.Plot] = picture
		chart, err := t.Chart.comment()
		if err != nil {
			return "", nil, err
		}
		fmt.Fprintf(&out, "%s\n![%s](%s)\n\n", chart, t.Title, t.Plot)
	}
	return out.String(), plots, nil
}

// Replace writes between these lines of a file.
const (
	figuresBegin = "<!-- figures: written by the benchmark -->\n"
	figuresEnd   = "<!-- end of figures -->\n"
)

// Replace replaces the text that a former run wrote into a file, and keeps everything around it.
func Replace(path, text string) error {
	whole, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begins := bytes.Cut(whole, []byte(figuresBegin))
	_, after, ends := bytes.Cut(rest, []byte(figuresEnd))
	if !begins || !ends {
		return fmt.Errorf("%s has no place for figures: the lines %q and %q are required", path, figuresBegin, figuresEnd)
	}
	whole = slices.Concat(before, []byte(figuresBegin+"\n"+wrap(strings.TrimSpace(text))+"\n\n"+figuresEnd), after)
	return os.WriteFile(path, whole, 0o644)
}

// wrap wraps prose at 100 columns. Tables, titles, first lines of charts, and pictures stay as they are.
func wrap(text string) string {
	const columns = 100
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		if line == "" || strings.ContainsAny(line[:1], "|#!<") {
			lines = append(lines, line)
			continue
		}
		short := ""
		for word := range strings.FieldsSeq(line) {
			switch {
			case short == "":
				short = word
			case utf8.RuneCountInString(short+" "+word) > columns:
				lines = append(lines, short)
				short = word
			default:
				short += " " + word
			}
		}
		lines = append(lines, short)
	}
	return strings.Join(lines, "\n")
}

// Machine describes the machine: number of cores, processor, operating system, and the version of Go.
func Machine() string {
	processor := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil { // on Linux
		if _, rest, found := strings.Cut(string(info), "model name"); found {
			name, _, _ := strings.Cut(rest, "\n")
			processor = strings.TrimLeft(name, "\t :")
		}
	}
	return fmt.Sprintf("%d cores of %s, %s, %s", runtime.NumCPU(), processor, runtime.GOOS, runtime.Version())
}
