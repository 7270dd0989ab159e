package rig

import (
	"bytes"
	"image/color"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The plots have no background, and colours that can be read on a white page and on a dark one.
var (
	ink    = color.NRGBA{0x7d, 0x85, 0x90, 0xff} // text, axes
	faint  = color.NRGBA{0x7d, 0x85, 0x90, 0x50} // grid
	series = []color.Color{
		color.NRGBA{0x2f, 0x81, 0xf7, 0xff}, // ours, where it is one of several
		color.NRGBA{0xdb, 0x6d, 0x28, 0xff},
		color.NRGBA{0x3f, 0x9c, 0x50, 0xff},
		color.NRGBA{0xa3, 0x71, 0xf7, 0xff},
		color.NRGBA{0xbf, 0x4b, 0x8a, 0xff},
		color.NRGBA{0x8c, 0x7a, 0x2b, 0xff},
	}
	other = color.NRGBA{0x8b, 0x94, 0x9e, 0xff}
)

const (
	plotWidth  = 7.5 * vg.Inch
	fontSmall  = 9
	fontLarger = 11
)

// Bar is one of a bar chart.
type Bar struct {
	Name string
	Spread
	Ours bool
}

// Bars draws horizontal bars, the first one on top: medians, with whiskers from the least to the
// greatest value. It returns an SVG, and nil if there are none.
func Bars(b testing.TB, title, unit string, write func(float64) string, bars []Bar) []byte {
	b.Helper()
	if len(bars) == 0 {
		return nil
	}
	p := newPlot(title)
	p.X.Label.Text = unit
	p.X.Min = 0
	var names []string
	var ends plotter.XYLabels
	most := 0.0
	for i := range bars {
		bar := bars[len(bars)-1-i]
		names = append(names, bar.Name)
		most = max(most, bar.Max)
		chart, err := plotter.NewBarChart(plotter.Values{bar.Median}, vg.Points(12))
		require.NoError(b, err)
		chart.Horizontal, chart.XMin, chart.LineStyle.Width = true, float64(i), 0
		chart.Color = other
		if bar.Ours {
			chart.Color = series[0]
		}
		whisker, err := plotter.NewXErrorBars(whiskers{{XY: plotter.XY{X: bar.Median, Y: float64(i)}, low: bar.Min, high: bar.Max}})
		require.NoError(b, err)
		whisker.LineStyle.Color, whisker.CapWidth = ink, vg.Points(5)
		p.Add(chart, whisker)
		ends.XYs = append(ends.XYs, plotter.XY{X: bar.Max, Y: float64(i)})
		ends.Labels = append(ends.Labels, " "+bar.Middle(write))
	}
	labels, err := plotter.NewLabels(ends)
	require.NoError(b, err)
	for i := range labels.TextStyle {
		style(&labels.TextStyle[i], fontSmall)
		labels.TextStyle[i].YAlign = draw.YCenter
	}
	p.Add(labels)
	p.NominalY(names...)
	p.Y.Tick.LineStyle.Width = 0
	p.X.Max = most * 1.12 // room for the figure behind the longest bar
	p.X.Tick.Marker = thousands{plot.DefaultTicks{}}
	return svg(b, p, vg.Points(float64(60+18*len(bars))))
}

// Line is one of a plot of growth.
type Line struct {
	Name   string
	Points []Point
}

// Point is what was measured at X.
type Point struct {
	X float64
	Spread
}

// Lines draws lines through the medians on logarithmic axes, with whiskers from the least to the
// greatest value: what grows in proportion is a straight line. It returns an SVG. Values that are not
// above 0 have no place on such axes and are left out.
func Lines(b testing.TB, title, x, y string, lines []Line) []byte {
	b.Helper()
	p := newPlot(title)
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Scale, axis.Tick.Marker = plot.LogScale{}, thousands{plot.LogTicks{Prec: -1}}
	}
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = faint, faint
	p.Add(grid)
	for i, line := range lines {
		var medians plotter.XYs
		var spreads whiskers
		for _, point := range line.Points {
			if point.N == 0 || point.X <= 0 || point.Min <= 0 {
				continue
			}
			at := plotter.XY{X: point.X, Y: point.Median}
			medians = append(medians, at)
			spreads = append(spreads, whisker{XY: at, low: point.Min, high: point.Max})
		}
		if len(medians) == 0 {
			continue
		}
		tint := series[i%len(series)]
		path, dots, err := plotter.NewLinePoints(medians)
		require.NoError(b, err)
		path.Color, path.Width = tint, vg.Points(1.5)
		dots.Color, dots.Shape, dots.Radius = tint, draw.CircleGlyph{}, vg.Points(2.5)
		ranges, err := plotter.NewYErrorBars(spreads)
		require.NoError(b, err)
		ranges.LineStyle.Color = tint
		p.Add(path, dots, ranges)
		if len(lines) > 1 {
			p.Legend.Add(line.Name, path, dots)
		}
	}
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		// Whole powers of ten at the ends, so that there are figures at the axis.
		axis.Min = math.Pow(10, math.Floor(math.Log10(axis.Min)))
		axis.Max = math.Pow(10, math.Ceil(math.Log10(axis.Max)))
	}
	return svg(b, p, 4*vg.Inch)
}

// whisker reaches from the least to the greatest value at a place.
type whisker struct {
	plotter.XY
	low, high float64
}

type whiskers []whisker

// Len implements plotter.XYer.
func (w whiskers) Len() int { return len(w) }

// XY implements plotter.XYer.
func (w whiskers) XY(i int) (x, y float64) { return w[i].X, w[i].Y }

// XError implements plotter.XErrorer.
func (w whiskers) XError(i int) (low, high float64) { return w[i].X - w[i].low, w[i].high - w[i].X }

// YError implements plotter.YErrorer.
func (w whiskers) YError(i int) (low, high float64) { return w[i].Y - w[i].low, w[i].high - w[i].Y }

// thousands writes the labels of ticks with their thousands apart.
type thousands struct{ plot.Ticker }

// Ticks implements plot.Ticker.
func (t thousands) Ticks(low, high float64) []plot.Tick {
	ticks := t.Ticker.Ticks(low, high)
	for i := range ticks {
		if value := ticks[i].Value; ticks[i].Label != "" && value == math.Trunc(value) {
			ticks[i].Label = Count(value)
		}
	}
	return ticks
}

func newPlot(title string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text, p.Title.Padding = title, vg.Points(6)
	style(&p.Title.TextStyle, fontLarger)
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Color, axis.Tick.Color = ink, ink
		style(&axis.Label.TextStyle, fontSmall)
		style(&axis.Tick.Label, fontSmall)
	}
	p.Legend.Top, p.Legend.Left = true, true
	style(&p.Legend.TextStyle, fontSmall)
	return p
}

func style(s *text.Style, size float64) {
	s.Color = ink
	s.Font = font.From(font.Font{Typeface: "Liberation", Variant: "Sans"}, vg.Points(size))
}

func svg(b testing.TB, p *plot.Plot, height vg.Length) []byte {
	b.Helper()
	canvas := vgsvg.New(plotWidth, height)
	// Room for the last figure at the axis, which is centred under its end, and for the longest name.
	p.Draw(draw.Crop(draw.New(canvas), vg.Points(6), -vg.Points(16), 0, 0))
	var out bytes.Buffer
	_, err := canvas.WriteTo(&out)
	require.NoError(b, err)
	return out.Bytes()
}
