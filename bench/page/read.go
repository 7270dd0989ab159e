package page

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Redraw draws the charts of all pages in a folder from the figures in the pages, and returns them by
// file name.
func Redraw(folder string) (map[string][]byte, error) {
	pages, err := filepath.Glob(filepath.Join(folder, "*.md"))
	if err != nil {
		return nil, err
	}
	plots := map[string][]byte{}
	for _, name := range pages {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		tables, err := parse(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		for _, t := range tables {
			if plots[t.Plot], err = t.draw(); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return plots, nil
}

// parse returns the tables of a page that have a chart, as written by Figures.Write.
func parse(text string) ([]Table, error) {
	var tables []Table
	var t Table
	var comment string // the lines of a chart, from the first on
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if title, found := strings.CutPrefix(line, "### "); found {
			t = Table{Title: title}
			continue
		}
		if cells, found := strings.CutPrefix(line, "| "); found {
			row := strings.Split(strings.TrimSuffix(cells, " |"), " | ")
			switch {
			case t.Head == nil:
				t.Head = row
			case !slices.Contains(row, "---"):
				t.Rows = append(t.Rows, row)
			}
			continue
		}
		if comment != "" || strings.HasPrefix(line, chartBegin) {
			comment += line
			if line = comment; !strings.HasSuffix(line, chartEnd) {
				continue
			}
			comment = ""
		}
		chart, found, err := parseChart(line)
		if err != nil {
			return nil, fmt.Errorf("the chart of %q: %w", t.Title, err)
		}
		if found {
			t.Chart = &chart
		}
		if picture, found := strings.CutPrefix(line, "!["); found && t.Chart != nil {
			_, file, _ := strings.Cut(picture, "](")
			t.Plot = strings.TrimSuffix(file, ")")
			tables = append(tables, t)
			t.Chart = nil
		}
	}
	return tables, nil
}
