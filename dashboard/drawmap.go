package dashboard

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// outcome is what became of a rank.
type outcome int

// The outcomes, in the order in which they are told.
const (
	rankPaid outcome = iota
	rankOffered
	rankEnded
	rankSkipped
	rankWaiting
)

// outcomeLooks are the class, the name and the shape of each outcome: shapes tell them apart without colours. A shape
// is a part of an SVG path in a cell of 10 by 10.
var outcomeLooks = [...]struct{ class, name, shape string }{
	{"o-paid", "paid", "m1 1h8v8h-8z"},
	{"o-offered", "offered, not paid", "m1 1h8v8h-8zm2 2v4h4v-4z"},
	{"o-ended", "expired or cancelled", "m1 4h8v3h-8z"},
	{"o-skipped", "skipped", "m6 1h3l-5 8h-3z"},
	{"o-waiting", "waiting", "m4 4h2v2h-2z"},
}

func (o outcome) String() string { return outcomeLooks[o].name }

// Class and Shape are for templates.
func (o outcome) Class() string { return outcomeLooks[o].class }
func (o outcome) Shape() string { return "M0 0" + outcomeLooks[o].shape }

const (
	// cellsMax bounds the cells of the maps of a page, and cellsAcross those of a row.
	cellsMax    = 600
	cellsAcross = 50
	// cellSize is the side of a cell.
	cellSize = 10
)

// rankMap shows the ranks of an item in their order, row by row.
type rankMap struct {
	// Code is that of the item; empty in a sale without items.
	Code string
	// Total is how many ranks there are, Shown how many of them the map has, and PerCell how many each cell.
	Total, Shown, PerCell int64
	Width, Height         int
	Paths                 []rankPath
}

// rankPath draws all cells with the same outcome.
type rankPath struct {
	outcome
	D string
}

// newRankMap makes a map of at most so many cells. It has all ranks, or, if there are more, those that had their turn
// and as many after them. A cell of many ranks shows what became of most of those that had their turn.
func newRankMap(code string, turns []turn, total int64, cells int) rankMap {
	cells = max(cells/cellsAcross, 1) * cellsAcross
	had := int64(0)
	if len(turns) > 0 {
		had = turns[0].Turns
	}
	m := rankMap{Code: code, Total: total, Shown: min(total, max(int64(cells), 2*had)), Width: cellsAcross * cellSize}
	m.PerCell = max((m.Shown+int64(cells)-1)/int64(cells), 1)
	found := make([][rankWaiting]int, (m.Shown+m.PerCell-1)/m.PerCell)
	for _, t := range sampled(turns) {
		found[t.Rank/m.PerCell][t.Outcome()]++
	}
	var paths [rankWaiting + 1]strings.Builder
	for cell, of := range found {
		most := rankWaiting
		for o, n := range of {
			if n > 0 && (most == rankWaiting || n > of[most]) {
				most = outcome(o)
			}
		}
		x, y := cell%cellsAcross*cellSize, cell/cellsAcross*cellSize
		fmt.Fprintf(&paths[most], "M%d %d%s", x, y, outcomeLooks[most].shape)
	}
	m.Height = (len(found) + cellsAcross - 1) / cellsAcross * cellSize
	for o := range paths {
		if paths[o].Len() > 0 {
			m.Paths = append(m.Paths, rankPath{outcome(o), paths[o].String()})
		}
	}
	return m
}

// pace is a chart of the turns by second.
type pace struct {
	From, To time.Time
	// Most is the highest rate of a second, and Each how long a bar is.
	Most             float64
	Each             time.Duration
	Offered, Skipped string // paths in 100 by 100 units
}

// barsMax bounds the bars of a chart.
const barsMax = 120

// newPace returns nil without turns.
func newPace(of [][]turn) *pace {
	var all []turn
	for _, turns := range of {
		all = append(all, sampled(turns)...)
	}
	if len(all) == 0 {
		return nil
	}
	early := func(a, b turn) int { return a.OfferedAt.Compare(b.OfferedAt) }
	p := &pace{From: slices.MinFunc(all, early).OfferedAt.Truncate(time.Second), To: slices.MaxFunc(all, early).OfferedAt}
	for p.Each = time.Second; p.To.Sub(p.From) >= barsMax*p.Each; {
		p.Each *= 2
	}
	type bar struct{ offered, skipped float64 }
	bars := make([]bar, max(p.To.Sub(p.From)/p.Each+1, barsMin))
	for _, t := range all {
		b, rate := &bars[t.OfferedAt.Sub(p.From)/p.Each], float64(t.Step)/p.Each.Seconds()
		if t.Reason == "" {
			b.offered += rate
		} else {
			b.skipped += rate
		}
		p.Most = max(p.Most, b.offered+b.skipped)
	}
	p.To = p.From.Add(time.Duration(len(bars)) * p.Each)
	var given, passed strings.Builder
	width, height := 100/float64(len(bars)), 100/p.Most
	for i, b := range bars {
		x, mid := float64(i)*width, 100-b.offered*height
		if b.offered > 0 {
			fmt.Fprintf(&given, "M%.2f 100V%.2fh%.2fV100z", x, mid, width*.9)
		}
		if b.skipped > 0 {
			fmt.Fprintf(&passed, "M%.2f %.2fV%.2fh%.2fV%.2fz", x, mid, mid-b.skipped*height, width*.9, mid)
		}
	}
	p.Offered, p.Skipped = given.String(), passed.String()
	return p
}

// barsMin keeps the bar of a single second from filling the chart.
const barsMin = 30

// MostText is the highest rate.
func (p *pace) MostText() string { return perSecond(p.Most) }
