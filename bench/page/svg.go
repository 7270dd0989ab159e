package page

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A picture has a transparent background and follows the reader's colour scheme. Text is measured as
// wide as the widest common fonts draw it, so that labels are neither cut nor overlap bars in those
// fonts.
const (
	pictureWidth = 760.0
	margin       = 14.0
	fontSize     = 13.0
	titleSize    = 15.0
	runeWidth    = 0.68 // of the font size: DejaVu Sans and Verdana, with room to spare
	gap          = 8.0
)

// colour is a colour for white pages and one for dark pages.
type colour struct{ light, dark string }

var (
	ink    = colour{"#1f2328", "#e6edf3"}
	grid   = colour{"#d1d9e0", "#3d444d"} // of low contrast
	others = colour{"#6e7781", "#768390"} // bars that are not highlighted
	ours   = colour{"#0969da", "#388bfd"}
	series = []colour{
		{"#0550ae", "#79c0ff"},
		{"#bc4c00", "#f0883e"},
		{"#116329", "#56d364"},
		{"#8250df", "#d2a8ff"},
		{"#bf3989", "#ff9bce"},
		{"#7d4e00", "#e3b341"},
	}
	// dashes distinguish lines without colours.
	dashes = []string{"", "7 4", "2 4", "10 4 2 4", "4 2", "1 3"}
)

// canvas is an unfinished picture.
type canvas struct {
	body   bytes.Buffer
	height float64
}

// textWidth is the maximum width of a text.
func textWidth(text string, size float64) float64 {
	return float64(utf8.RuneCountInString(text)) * size * runeWidth
}

func num(v float64) string { return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) }

var escape = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

// text draws a text with its anchor (start, middle, end) at x and its vertical middle at y.
func (c *canvas) text(x, y float64, anchor, class, text string) {
	fmt.Fprintf(&c.body, `<text x="%s" y="%s" text-anchor="%s"%s>%s</text>`+"\n",
		num(x), num(y+0.35*fontSize), anchor, attribute("class", class), escape.Replace(text))
}

func (c *canvas) line(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(&c.body, `<path class="%s" d="M%s %sL%s %s"/>`+"\n", class, num(x1), num(y1), num(x2), num(y2))
}

func (c *canvas) rect(x, y, width, height float64, class string) {
	fmt.Fprintf(&c.body, `<rect class="%s" x="%s" y="%s" width="%s" height="%s"/>`+"\n",
		class, num(x), num(y), num(width), num(height))
}

func (c *canvas) dot(x, y float64, class string) {
	fmt.Fprintf(&c.body, `<circle class="%s" cx="%s" cy="%s" r="3"/>`+"\n", class, num(x), num(y))
}

func (c *canvas) path(xs, ys []float64, class, dash string) {
	var d strings.Builder
	for i := range xs {
		fmt.Fprintf(&d, "%c%s %s", "ML"[min(i, 1)], num(xs[i]), num(ys[i]))
	}
	fmt.Fprintf(&c.body, `<path class="%s"%s d="%s"/>`+"\n", class, attribute("stroke-dasharray", dash), d.String())
}

func attribute(name, text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf(` %s="%s"`, name, text)
}

// svg returns the complete picture.
func (c *canvas) svg(title string) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" width="%s" height="%s" role="img" `+
		`font-family="system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif" font-size="%s">`+
		"\n",
		num(pictureWidth), num(c.height), num(pictureWidth), num(c.height), num(fontSize))
	fmt.Fprintf(&out, "<title>%s</title>\n<style>\n", escape.Replace(title))
	out.WriteString("text{stroke:none}path{fill:none;stroke-width:1.2}.bold{font-weight:600}.s{stroke-width:2}\n")
	style(&out, func(c colour) string { return c.light })
	out.WriteString("@media (prefers-color-scheme: dark){\n")
	style(&out, func(c colour) string { return c.dark })
	out.WriteString("}\n</style>\n")
	fmt.Fprintf(&out, `<text class="bold" x="%s" y="%s" font-size="%s">%s</text>`+"\n",
		num(margin), num(margin+titleSize), num(titleSize), escape.Replace(title))
	out.Write(c.body.Bytes())
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// style writes the colours of one scheme.
func style(out *bytes.Buffer, of func(colour) string) {
	fmt.Fprintf(out, "text,.ink{fill:%s}.axis{stroke:%s}.grid{stroke:%s}.others{fill:%s}.ours{fill:%s}\n",
		of(ink), of(ink), of(grid), of(others), of(ours))
	for i, s := range series {
		fmt.Fprintf(out, ".s%d{stroke:%s}circle.s%d{fill:%s}", i, of(s), i, of(s))
	}
	out.WriteString("\n")
}
