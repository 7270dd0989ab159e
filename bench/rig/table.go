package rig

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Table is a result of a benchmark for human readers.
type Table struct {
	Title string
	// Note is printed above the table and says what was measured.
	Note string
	Head []string
	Rows [][]string
	// Bars is the index of a column, if it is not 0: the next column shows its figures as bars.
	Bars int
}

// none marks cells without a measurement.
const none = "–"

// page collects the tables of a run.
type page struct{ tables []Table }

// put adds a table, or replaces the one with the same title: the go command runs a benchmark once
// before it runs it with the requested number of rounds.
func (p *page) put(t Table) {
	if i := slices.IndexFunc(p.tables, func(have Table) bool { return have.Title == t.Title }); i >= 0 {
		p.tables[i] = t
		return
	}
	p.tables = append(p.tables, t)
}

// markdown returns all tables, in the order of their first put.
func (p *page) markdown() string {
	var out strings.Builder
	for _, t := range p.tables {
		fmt.Fprintf(&out, "### %s\n\n%s\n\n", t.Title, t.Note)
		rows := slices.Concat([][]string{t.Head, slices.Repeat([]string{"---"}, len(t.Head))}, t.Rows)
		if t.Bars > 0 {
			rows = t.withBars(rows)
		}
		for _, row := range rows {
			fmt.Fprintf(&out, "| %s |\n", strings.Join(row, " | "))
		}
		out.WriteString("\n")
	}
	return out.String()
}

// withBars inserts the column of bars. The greatest figure has one of barCells characters.
func (t Table) withBars(rows [][]string) [][]string {
	const barCells, eighths = 12, "▏▎▍▌▋▊▉█"
	number := func(cell string) float64 {
		digits, _, _ := strings.Cut(cell, " ") // the unit or the range follows
		v, err := strconv.ParseFloat(strings.ReplaceAll(digits, ",", ""), 64)
		if err != nil {
			return 0 // the head, or nothing was measured
		}
		return v
	}
	most := 0.0
	for _, row := range t.Rows {
		most = max(most, number(row[t.Bars]))
	}
	var drawn [][]string
	for i, row := range rows {
		bar := ""
		if i == 1 { // below the head
			bar = "---"
		}
		if v := number(row[t.Bars]); v > 0 {
			n := max(1, int(v/most*barCells*8+0.5))
			bar = strings.Repeat("█", n/8)
			if rest := n % 8; rest > 0 {
				bar += string([]rune(eighths)[rest-1])
			}
		}
		drawn = append(drawn, slices.Insert(slices.Clone(row), t.Bars+1, bar))
	}
	return drawn
}

// replaceFigures writes between these lines of a file.
const (
	figuresBegin = "<!-- figures: written by the benchmark -->\n"
	figuresEnd   = "<!-- end of figures -->\n"
)

// replaceFigures replaces the text that a former run wrote into a file, and keeps everything around it.
func replaceFigures(path, text string) error {
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

// wrap wraps prose at 100 columns. Tables and titles stay as they are.
func wrap(text string) string {
	const columns = 100
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		if line == "" || strings.ContainsAny(line[:1], "|#") {
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

// machine describes the machine: number of cores, processor, operating system, and the version of Go.
func machine() string {
	processor := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil { // on Linux
		if _, rest, found := strings.Cut(string(info), "model name"); found {
			name, _, _ := strings.Cut(rest, "\n")
			processor = strings.TrimLeft(name, "\t :")
		}
	}
	return fmt.Sprintf("%d cores of %s, %s, %s", runtime.NumCPU(), processor, runtime.GOOS, runtime.Version())
}
