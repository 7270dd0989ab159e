// Package rig is the common base of the benchmarks of this module: a private Redis and Postgres,
// Stampede's own binary and the designs of the ladder as processes, their cost in CPU time, rounds in
// which candidates take turns, and the page with the results.
package rig

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"stampede/bench/designs"
	"stampede/bench/front"
	"stampede/internal/format"
)

var (
	figuresFolder = flag.String("figures", "", "`folder` of the page NAME.md, to write the figures there as well")
	only          = flag.String("only", "",
		"regular `expression`: runs only candidates whose names match, for profiling or development")
)

var (
	// figures are the results of the benchmarks of this process, by Table.Page.
	figures = map[string]*page{}
	// measuredWith are the versions of the servers and programs that took part.
	measuredWith []string
	// atExit are called after all benchmarks, the last one first.
	atExit []func()
)

// Put adds a table to the page, or replaces the one with the same title.
func Put(t Table) {
	if figures[t.Page] == nil {
		figures[t.Page] = &page{}
	}
	figures[t.Page].put(t)
}

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
	if text := os.Getenv(distanceEnv); text != "" {
		fmt.Fprintln(os.Stderr, proxyMain(text))
		os.Exit(1)
	}
	flag.Parse()
	if (*only != "" || conditions != Conditions{}) && *figuresFolder != "" {
		fmt.Fprintln(os.Stderr, "-figures writes pages about all candidates on this machine as it is: it cannot be "+
			"combined with -only, -sync or -round-trip")
		os.Exit(2)
	}
	code := m.Run()
	for _, stop := range slices.Backward(atExit) {
		stop()
	}
	for other, page := range figures {
		text := "Measured " + time.Now().UTC().Format(time.DateOnly) + " on " + machine() + ", with " +
			versions(modules) + ".\n\n" + page.markdown()
		fmt.Printf("\n%s", text)
		if *figuresFolder != "" && code == 0 {
			if err := replaceFigures(filepath.Join(*figuresFolder, cmp.Or(other, name)+".md"), text); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
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

// Candidate is one of the compared systems.
type Candidate struct {
	Name string
	// Turn measures one turn. Its setup and cleanup are not measured.
	Turn func(b *testing.B, round int) Values
}

// Values are the results of a turn by figure. A figure that could not be measured is left out.
type Values map[string]float64

// Results are the values of all rounds.
type Results struct {
	rounds []map[string]Values // by candidate
}

// Compare runs b.N rounds: in each of them every candidate that -only selects has a turn. The order
// changes from round to round, so that a machine that becomes slower affects all of them alike.
func Compare(b *testing.B, candidates ...Candidate) *Results {
	b.Helper()
	return CompareInTurns(b, 1, candidates...)
}

// CompareInTurns gives every candidate several turns in each round. The value of a round is the median
// of its turns.
func CompareInTurns(b *testing.B, turns int, candidates ...Candidate) *Results {
	b.Helper()
	candidates, err := chosen(candidates, *only)
	if err != nil {
		b.Fatal(err)
	}
	r := &Results{}
	for round := range b.N {
		found := make(map[string]map[string][]float64)
		for turn := range turns {
			for place := range candidates {
				c := candidates[(place+turn+round)%len(candidates)]
				if found[c.Name] == nil {
					found[c.Name] = make(map[string][]float64)
				}
				for figure, v := range c.Turn(b, round) {
					found[c.Name][figure] = append(found[c.Name][figure], v)
				}
			}
		}
		values := make(map[string]Values)
		for name, figures := range found {
			values[name] = Values{}
			for figure, all := range figures {
				values[name][figure] = Summarize(all).Median
			}
			b.Logf("round %d: %s: %v", round, name, values[name])
		}
		r.rounds = append(r.rounds, values)
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	return r
}

// chosen returns the candidates whose names match the expression.
func chosen(candidates []Candidate, expression string) ([]Candidate, error) {
	names, err := regexp.Compile(expression)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	found := slices.DeleteFunc(slices.Clone(candidates), func(c Candidate) bool { return !names.MatchString(c.Name) })
	if len(found) == 0 {
		known := make([]string, len(candidates))
		for i, c := range candidates {
			known[i] = c.Name
		}
		return nil, fmt.Errorf("-only matches none of these: %s", strings.Join(known, "; "))
	}
	return found, nil
}

// Spread is the median and the range of the values of several rounds.
type Spread struct {
	N                       int // number of values; 0 means that nothing was measured
	Median, least, greatest float64
}

// Of is the spread of a candidate's figure.
func (r *Results) Of(candidate, figure string) Spread {
	var values []float64
	for _, round := range r.rounds {
		if v, found := round[candidate][figure]; found {
			values = append(values, v)
		}
	}
	return Summarize(values)
}

// Ratio is the spread of a figure of one candidate ÷ a figure of another, computed per round.
func (r *Results) Ratio(candidate, figure, other, otherFigure string) Spread {
	var ratios []float64
	for _, round := range r.rounds {
		v, found := round[candidate][figure]
		w, foundOther := round[other][otherFigure]
		if found && foundOther && w != 0 {
			ratios = append(ratios, v/w)
		}
	}
	return Summarize(ratios)
}

// Report adds the median of a figure to the benchmark's line of output.
func (r *Results) Report(b *testing.B, candidate, figure, unit string) {
	if s := r.Of(candidate, figure); s.N > 0 {
		b.ReportMetric(s.Median, strings.ReplaceAll(candidate, " ", "-")+"_"+unit)
	}
}

// Medians are the cells of a row: the medians of a candidate's figures, all in the same format.
func (r *Results) Medians(write func(float64) string, candidate string, figures ...string) []string {
	var cells []string
	for _, figure := range figures {
		cells = append(cells, r.Of(candidate, figure).FormatMedian(write))
	}
	return cells
}

// Ranges are the same cells with the range of each figure.
func (r *Results) Ranges(write func(float64) string, candidate string, figures ...string) []string {
	var cells []string
	for _, figure := range figures {
		cells = append(cells, r.Of(candidate, figure).Format(write))
	}
	return cells
}

// Summarize computes the spread of values.
func Summarize(values []float64) Spread {
	n := len(values)
	if n == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	return Spread{N: n, Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, least: sorted[0], greatest: sorted[n-1]}
}

// Format writes the median, and the range if it reads differently.
func (s Spread) Format(write func(float64) string) string {
	if s.N == 0 {
		return none
	}
	median, least, greatest := write(s.Median), write(s.least), write(s.greatest)
	if least == greatest {
		return median
	}
	return fmt.Sprintf("%s (%s–%s)", median, least, greatest)
}

// FormatMedian writes the median only.
func (s Spread) FormatMedian(write func(float64) string) string {
	if s.N == 0 {
		return none
	}
	return write(s.Median)
}

// Count writes a whole number with thousands separators.
func Count(v float64) string { return format.Count(int64(math.Round(v))) }

// Ratio writes a number with about three digits.
func Ratio(v float64) string {
	switch {
	case v < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return Count(v)
}

// InMillis converts a time to milliseconds.
func InMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Table is a result of a benchmark for human readers.
type Table struct {
	// Page is the page of the table if it is not that of Main.
	Page  string
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
