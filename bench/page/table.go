// Package page holds what a benchmark found as tables with plots, and writes them into the pages of docs/bench.
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

// Table is what a benchmark found, for people.
type Table struct {
	Title string
	// Note says above the table what was measured.
	Note string
	Head []string
	Rows [][]string
	// Plot is the file of a picture of it, beside the page, which is drawn as Chart says; "" if there is none.
	Plot  string
	Chart *Chart
}

// Figures collects the tables of a run. It is safe for concurrent use.
type Figures struct {
	mu     sync.Mutex
	tables []Table
}

// Put adds a table, in the place of one with the same title: the go command runs a benchmark once
// before it runs it as often as it was told.
func (f *Figures) Put(t Table) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := slices.IndexFunc(f.tables, func(have Table) bool { return have.Title == t.Title }); i >= 0 {
		f.tables[i] = t
		return
	}
	f.tables = append(f.tables, t)
}

// Write prints all tables in the order in which they came, and draws their charts.
func (f *Figures) Write() (markdown string, plots map[string][]byte, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out strings.Builder
	plots = map[string][]byte{}
	for _, t := range f.tables {
		fmt.Fprintf(&out, "### %s\n\n%s\n\n", t.Title, t.Note)
		rule := slices.Repeat([]string{"---"}, len(t.Head))
		for _, row := range slices.Concat([][]string{t.Head, rule}, t.Rows) {
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
		if picture == nil { // -only has left nothing to draw
			continue
		}
		plots[t.Plot] = picture
		chart, err := t.Chart.line()
		if err != nil {
			return "", nil, err
		}
		fmt.Fprintf(&out, "%s\n![%s](%s)\n\n", chart, t.Title, t.Plot)
	}
	return out.String(), plots, nil
}

// The lines of a file between which Replace writes.
const (
	figuresBegin = "<!-- figures: written by the benchmark -->\n"
	figuresEnd   = "<!-- end of figures -->\n"
)

// Replace writes text into a file in the place of what a former run wrote there, and leaves alone what
// people wrote around it.
func Replace(path, text string) error {
	whole, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begins := bytes.Cut(whole, []byte(figuresBegin))
	_, after, ends := bytes.Cut(rest, []byte(figuresEnd))
	if !begins || !ends {
		return fmt.Errorf("%s has no place for figures: want the lines %q and %q", path, figuresBegin, figuresEnd)
	}
	whole = slices.Concat(before, []byte(figuresBegin+"\n"+wrap(strings.TrimSpace(text))+"\n\n"+figuresEnd), after)
	return os.WriteFile(path, whole, 0o644)
}

// wrap breaks prose at 100 columns, as all pages are. Tables, titles, charts and pictures stay.
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

// Machine names the processor, how many cores of it there are, and Go.
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
