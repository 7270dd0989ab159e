package page

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Chart says how a table is drawn. The page keeps it beside the picture, so that the picture can be drawn again
// from the page.
type Chart struct {
	// Kind is Bars or Lines.
	Kind string `json:"kind"`
	// Title is the title of the picture; that of the table if it is empty.
	Title string `json:"title,omitempty"`
	// X is the head of the column with the places of the points. It is for Lines only. If it is the first column,
	// each of Columns is a line; otherwise the first column names the lines, and Columns is one.
	X string `json:"x,omitempty"`
	// Columns are the heads of what is drawn.
	Columns []string `json:"columns"`
	// Unit is that of the drawn columns.
	Unit string `json:"unit"`
}

// The kinds of charts.
const (
	// Bars are horizontal, one for each row, named by its first cell. Whiskers reach from the least to the greatest value.
	Bars = "bars"
	// Lines run through the medians on logarithmic axes: what grows in proportion is a straight line.
	Lines = "lines"
)

// line is the line of a page that keeps the chart.
func (c Chart) line() (string, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	return chartBegin + string(text) + chartEnd, nil
}

const chartBegin, chartEnd = "<!-- chart ", " -->"

// parseChart reads what line has written. It is false for any other line.
func parseChart(line string) (c Chart, found bool, err error) {
	text, begins := strings.CutPrefix(line, chartBegin)
	text, ends := strings.CutSuffix(text, chartEnd)
	if !begins || !ends {
		return Chart{}, false, nil
	}
	err = json.Unmarshal([]byte(text), &c)
	return c, err == nil, err
}

// value is a figure of a table: a median, and the least and the greatest value where the table has them.
type value struct {
	median, least, greatest float64
	text                    string // the median as the table has it
}

// parseValue reads a cell such as "9.43 ms" or "28,664 (25,640–38,890)". It is false for a cell without a figure.
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
	number, _, _ := strings.Cut(text, " ") // the unit is behind it
	return strconv.ParseFloat(strings.ReplaceAll(number, ",", ""), 64)
}

// None stands in a table where nothing was measured.
const None = "–"

// draw draws the table as its chart says. It returns an SVG, or nil if there is nothing to draw.
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
		err = fmt.Errorf("there is no chart of the kind %q", c.Kind)
	}
	if err != nil {
		return nil, fmt.Errorf("draw %q: %w", t.Title, err)
	}
	return svg, nil
}

func (t Table) column(head string) (int, error) {
	i := slices.Index(t.Head, head)
	if i < 0 {
		return 0, fmt.Errorf("there is no column %q", head)
	}
	return i, nil
}

func (t Table) drawBars(c Chart) ([]byte, error) {
	if len(c.Columns) != 1 {
		return nil, fmt.Errorf("bars have one column, and not %d", len(c.Columns))
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

// product begins the names of bars that stand out.
const product = "Stampede"

func (t Table) drawLines(c Chart) ([]byte, error) {
	x, err := t.column(c.X)
	if err != nil {
		return nil, err
	}
	var lines []line
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
			i := slices.IndexFunc(lines, func(l line) bool { return l.name == name })
			if i < 0 {
				i = len(lines)
				lines = append(lines, line{name: name})
			}
			at, _, err := parseValue(row[x])
			if err != nil {
				return nil, err
			}
			v, _, err := parseValue(row[y])
			if err != nil {
				return nil, err
			}
			if at.median > 0 && v.least > 0 { // anything else has no place on such axes
				lines[i].points = append(lines[i].points, point{at.median, v})
			}
		}
	}
	lines = slices.DeleteFunc(lines, func(l line) bool { return len(l.points) == 0 })
	if len(lines) == 0 {
		return nil, nil
	}
	return drawLines(c.Title, c.X, c.Unit, lines), nil
}
