package page

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"stampede/internal/figure"
)

const (
	titleHeight = margin + titleSize + 22
	barHeight   = 14.0
	barPitch    = 25.0
	axisHeight  = 52.0 // the ticks, their labels and the unit
)

// bar is one bar of a chart.
type bar struct {
	name string
	value
	measured, ours bool
}

// drawBars draws names, bars and values in separate columns, the first bar on top.
func drawBars(title, unit string, bars []bar) []byte {
	names, values, most := 0.0, 0.0, 0.0
	for _, b := range bars {
		names, most = max(names, textWidth(b.name, fontSize)), max(most, b.greatest)
		values = max(values, textWidth(b.text, fontSize))
	}
	left := margin + names + gap
	right := pictureWidth - margin - values - gap
	bottom := titleHeight + barPitch*float64(len(bars))
	c := &canvas{height: bottom + axisHeight}
	step := niceStep(most, 5)
	end := step * math.Ceil(most/step)
	x := func(v float64) float64 { return left + (right-left)*v/end }
	for i := 0; float64(i)*step <= end; i++ {
		at := x(float64(i) * step)
		c.line(at, titleHeight, at, bottom, "grid")
		c.text(at, bottom+14, "middle", "", tickLabel(float64(i)*step))
	}
	c.text((left+right)/2, bottom+36, "middle", "", unit)
	for i, b := range bars {
		y := titleHeight + barPitch*(float64(i)+0.5)
		class, nameClass := "others", ""
		if b.ours {
			class, nameClass = "ours", "bold"
		}
		c.text(left-gap, y, "end", nameClass, b.name)
		if !b.measured {
			c.text(left+gap, y, "start", "", None)
			continue
		}
		c.rect(left, y-barHeight/2, x(b.median)-left, barHeight, class)
		if b.least < b.greatest {
			c.line(x(b.least), y, x(b.greatest), y, "axis")
			c.line(x(b.least), y-4, x(b.least), y+4, "axis")
			c.line(x(b.greatest), y-4, x(b.greatest), y+4, "axis")
		}
		c.text(x(b.greatest)+gap, y, "start", nameClass, b.text)
	}
	c.line(left, titleHeight, left, bottom, "axis")
	return c.svg(title)
}

// niceStep returns a step of 1, 2 or 5 times a power of ten that divides a span from 0 into at most so
// many.
func niceStep(span float64, most int) float64 {
	power := math.Pow(10, math.Floor(math.Log10(span/float64(most))))
	for _, factor := range []float64{1, 2, 5} {
		if span <= factor*power*float64(most) {
			return factor * power
		}
	}
	return 10 * power
}

func tickLabel(v float64) string {
	if v == math.Trunc(v) {
		return figure.Count(int64(v))
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// curve is one line of a chart.
type curve struct {
	name   string
	points []point
}

// point is a measurement at x.
type point struct {
	x float64
	value
}

const plotHeight = 300.0

// drawLines draws lines through the medians on logarithmic axes, with whiskers, and a legend if there
// are several.
func drawLines(title, xUnit, yUnit string, lines []curve) []byte {
	var xs, ys []float64
	for _, l := range lines {
		for _, p := range l.points {
			xs, ys = append(xs, p.x), append(ys, p.least, p.greatest)
		}
	}
	xTicks, yTicks := logTicks(xs), logTicks(ys)
	labels := 0.0
	for _, tick := range yTicks {
		labels = max(labels, textWidth(tickLabel(tick), fontSize))
	}
	left, right := margin+labels+gap, pictureWidth-margin-textWidth(tickLabel(xTicks[len(xTicks)-1]), fontSize)/2
	c := &canvas{}
	c.text(margin, titleHeight, "start", "", yUnit)
	top := c.legend(lines, titleHeight+24)
	bottom := top + plotHeight
	c.height = bottom + axisHeight
	x := logScale(xTicks, left, right)
	y := logScale(yTicks, bottom, top)
	for _, tick := range xTicks {
		c.line(x(tick), top, x(tick), bottom, "grid")
	}
	for _, tick := range thinned(xTicks, func(tick float64) float64 { return textWidth(tickLabel(tick), fontSize) + gap },
		x) {
		c.text(x(tick), bottom+14, "middle", "", tickLabel(tick))
	}
	for _, tick := range yTicks {
		c.line(left, y(tick), right, y(tick), "grid")
	}
	for _, tick := range thinned(yTicks, func(float64) float64 { return fontSize + 3 }, y) {
		c.text(left-gap, y(tick), "end", "", tickLabel(tick))
	}
	c.line(left, top, left, bottom, "axis")
	c.line(left, bottom, right, bottom, "axis")
	c.text((left+right)/2, bottom+36, "middle", "", xUnit)
	for i, l := range lines {
		class := fmt.Sprintf("s%d", i%len(series))
		var px, py []float64
		for _, p := range l.points {
			at := x(p.x)
			px, py = append(px, at), append(py, y(p.median))
			if p.least < p.greatest {
				c.line(at, y(p.least), at, y(p.greatest), class)
			}
			c.dot(at, y(p.median), class)
		}
		c.path(px, py, "s "+class, dashes[i%len(dashes)])
	}
	return c.svg(title)
}

// legend draws the names of the lines from y on, in as many rows as they need, and returns the top of
// the plot.
func (c *canvas) legend(lines []curve, y float64) float64 {
	if len(lines) < 2 {
		return y
	}
	const sample = 28.0
	at := margin
	for i, l := range lines {
		width := sample + gap + textWidth(l.name, fontSize) + 2*gap
		if at > margin && at+width > pictureWidth-margin {
			at, y = margin, y+20
		}
		class := fmt.Sprintf("s%d", i%len(series))
		c.path([]float64{at, at + sample}, []float64{y, y}, "s "+class, dashes[i%len(dashes)])
		c.dot(at+sample/2, y, class)
		c.text(at+sample+gap, y, "start", "", l.name)
		at += width
	}
	return y + 22
}

// logTicks are 1, 2 and 5 times powers of ten, from the last one at or below all values to the first
// one at or above them.
func logTicks(values []float64) []float64 {
	least, greatest := slices.Min(values), slices.Max(values)
	var ticks []float64
	for power := math.Floor(math.Log10(least)); ; power++ {
		for _, factor := range []float64{1, 2, 5} {
			tick := factor * math.Pow(10, power)
			if tick <= least {
				ticks = ticks[:0] // drops lower ticks, keeps only the nearest one
			}
			ticks = append(ticks, tick)
			if tick >= greatest && len(ticks) > 1 {
				return ticks
			}
		}
	}
}

// logScale maps values to positions between from, at the first tick, and to, at the last one.
func logScale(ticks []float64, from, to float64) func(float64) float64 {
	least, greatest := math.Log10(ticks[0]), math.Log10(ticks[len(ticks)-1])
	return func(v float64) float64 { return from + (to-from)*(math.Log10(v)-least)/(greatest-least) }
}

// thinned returns the ticks that have room for labels: all of them, or only powers of ten.
func thinned(ticks []float64, room func(float64) float64, at func(float64) float64) []float64 {
	for i := 1; i < len(ticks); i++ {
		if math.Abs(at(ticks[i])-at(ticks[i-1])) < (room(ticks[i])+room(ticks[i-1]))/2 {
			return slices.DeleteFunc(slices.Clone(ticks), func(tick float64) bool {
				power := math.Log10(tick)
				return math.Abs(power-math.Round(power)) > 1e-9
			})
		}
	}
	return ticks
}
