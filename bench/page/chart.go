package page

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Chart describes how a table is drawn. The page stores it beside the picture, so that the picture can
// be redrawn from the page.
type Chart struct {
	// Kind is Bars or Lines.
	Kind string `json:"kind"`
	// Title is the title of the picture, by default that of the table.
	Title string `json:"title,omitempty"`
	// X is the head of the column with the x values, for Lines only. If it is the first column, each of
	// Columns is a line; otherwise the first column names the lines, and Columns has one element.
	X string `json:"x,omitempty"`
	// Columns are the heads of the drawn columns.
	Columns []string `json:"columns"`
	// Unit is that of the drawn columns.
	Unit string `json:"unit"`
}

// The kinds of charts.
const (
	// Bars are horizontal, one per row, named by its first cell. Whiskers show the least and the
	// greatest value.
	Bars = "bars"
	// Lines connect the medians on logarithmic axes, where proportional growth is a straight line.
	Lines = "lines"
)

// comment is the comment of the page that stores the chart, in two lines.
func (c Chart) comment() (string, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	return chartBegin + strings.Replace(string(text), `,"columns":`, ",\n\"columns\":", 1) + chartEnd, nil
}

const chartBegin, chartEnd = "<!-- chart ", " -->"

// parseChart reads the output of Chart.comment. It returns false for any other text.
func parseChart(text string) (c Chart, found bool, err error) {
	text, begins := strings.CutPrefix(text, chartBegin)
	text, ends := strings.CutSuffix(text, chartEnd)
	if !begins || !ends {
		return Chart{}, false, nil
	}
	err = json.Unmarshal([]byte(text), &c)
	return c, err == nil, err
}

// value is a figure of a table: a median, and the range if the table has it.
type value struct {
	median, least, greatest float64
	text                    string // the median as written in the table
}

// parseValue reads a cell such as "9.43 ms" or "28,664 (25,640–38,890)". It returns false for a cell
// without a figure.
func parseValue(cell string) (v value, measured bool, err error) {
	cell = strings.Trim(strings.TrimSpace(cell), "*")
	if cell == "" || cell == None {
		return value{}, false, nil
	}
	median, spread, hasSpread := strings.Cut(cell, " (")
	v.text = median
	if v.median, err = parseNumber(median); err != nil {
		return value{}, false, err
	}
	v.least, v.greatest = v.median, v.median
	if !hasSpread {
		return v, true, nil
	}
	least, greatest, both := strings.Cut(strings.TrimSuffix(spread, ")"), "–")
	if !both {
		return value{}, false, fmt.Errorf("%q has no least and greatest value", cell)
	}
	if v.least, err = parseNumber(least); err != nil {
		return value{}, false, err
	}
	v.greatest, err = parseNumber(greatest)
	return v, true, err
}

func parseNumber(text string) (float64, error) {
	digits, _, _ := strings.Cut(text, " ") // the unit follows
	return strconv.ParseFloat(strings.ReplaceAll(digits, ",", ""), 64)
}

// None marks cells without a measurement.
const None = "–"

// draw draws the table as its chart says. It returns an SVG, or nil without anything to draw.
func (t Table) draw() ([]byte, error) {
	c := *t.Chart
	if c.Title == "" {
		c.Title = t.Title
	}
	var svg []byte
	var err error
	switch c.Kind {
	case Bars:
		svg, err = t.drawBars(c)
	case Lines:
		svg, err = t.drawLines(c)
	default:
		err = fmt.Errorf("unknown kind of chart %q", c.Kind)
	}
	if err != nil {
		return nil, fmt.Errorf("draw %q: %w", t.Title, err)
	}
	return svg, nil
}

func (t Table) column(head string) (int, error) {
	i := slices.Index(t.Head, head)
	if i < 0 {
		return 0, fmt.Errorf("unknown column %q", head)
	}
	return i, nil
}

func (t Table) drawBars(c Chart) ([]byte, error) {
	if len(c.Columns) != 1 {
		return nil, fmt.Errorf("bars need one column, got %d", len(c.Columns))
	}
	at, err := t.column(c.Columns[0])
	if err != nil {
		return nil, err
	}
	var bars []bar
	for _, row := range t.Rows {
		v, measured, err := parseValue(row[at])
		if err != nil {
			return nil, err
		}
		bars = append(bars, bar{name: row[0], value: v, measured: measured, ours: strings.HasPrefix(row[0], product)})
	}
	if len(bars) == 0 {
		return nil, nil
	}
	return drawBars(c.Title, c.Unit, bars), nil
}

// product begins the names of highlighted bars.
const product = "Stampede"

func (t Table) drawLines(c Chart) ([]byte, error) {
	x, err := t.column(c.X)
	if err != nil {
		return nil, err
	}
	var lines []curve
	for _, head := range c.Columns {
		y, err := t.column(head)
		if err != nil {
			return nil, err
		}
		for _, row := range t.Rows {
			name := head
			if x > 0 {
				name = row[0]
			}
			i := slices.IndexFunc(lines, func(l curve) bool { return l.name == name })
			if i < 0 {
				i = len(lines)
				lines = append(lines, curve{name: name})
			}
			at, _, err := parseValue(row[x])
			if err != nil {
				return nil, err
			}
			v, _, err := parseValue(row[y])
			if err != nil {
				return nil, err
			}
			if at.median > 0 && v.least > 0 { // logarithmic axes have no other values
				lines[i].points = append(lines[i].points, point{at.median, v})
			}
		}
	}
	lines = slices.DeleteFunc(lines, func(l curve) bool { return len(l.points) == 0 })
	if len(lines) == 0 {
		return nil, nil
	}
	return drawLines(c.Title, c.X, c.Unit, lines), nil
}
