package page

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// textsOf returns the texts of an SVG, which must be well-formed.
func textsOf(t *testing.T, svg []byte) []string {
	t.Helper()
	var texts []string
	in := false
	for decoder := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return texts
		}
		require.NoError(t, err)
		switch token := token.(type) {
		case xml.StartElement:
			in = token.Name.Local == "text"
		case xml.EndElement:
			in = false
		case xml.CharData:
			if in {
				texts = append(texts, string(token))
			}
		}
	}
}

func TestBarsNameEachRowAndItsMedian(t *testing.T) {
	t.Parallel()
	table := Table{
		Title: "Orders", Head: []string{"design", "p50", "orders/s"},
		Rows: [][]string{
			{"Stampede", "1", "40,000 (38,000–45,000)"}, {"Echo & co", "2", "**1,500 (1,200–1,600)**"}, {"none", "3", None},
		},
		Chart: &Chart{Kind: Bars, Columns: []string{"orders/s"}, Unit: "orders/s"},
	}
	svg, err := table.draw()
	require.NoError(t, err)
	assert.Equal(t, []string{
		"Orders", "0", "10,000", "20,000", "30,000", "40,000", "50,000", "orders/s",
		"Stampede", "40,000", "Echo & co", "1,500", "none", None,
	}, textsOf(t, svg))

	table.Rows = nil
	svg, err = table.draw()
	require.NoError(t, err)
	assert.Nil(t, svg, "a table without rows")
}

func TestLinesHaveLogarithmicAxes(t *testing.T) {
	t.Parallel()
	table := Table{
		Title: "Growth", Head: []string{"buyers", "a", "b"},
		Rows: [][]string{
			{"1,000", "90 (80–100)", None},
			{"10,000", "900 (800–1,000)", "700 µs"},
			{"1,000,000", "90,000", "0"},
		},
		Chart: &Chart{Kind: Lines, Title: "Other title", X: "buyers", Columns: []string{"a", "b"}, Unit: "bytes"},
	}
	svg, err := table.draw()
	require.NoError(t, err)
	texts := textsOf(t, svg)
	assert.Subset(t, texts, []string{
		"Other title", "buyers", "bytes", "a", "b", "1,000", "10,000", "100,000", "1,000,000",
		"100",
	})
	assert.Equal(t, 6, strings.Count(string(svg), "<circle"), "four points, and two of the legend")
}

func TestLinesAreNamedByFirstColumn(t *testing.T) {
	t.Parallel()
	table := Table{
		Title: "CPU", Head: []string{"", "buyers/s", "all"},
		Rows:  [][]string{{"Echo", "1,000", "460"}, {"Echo", "2,500", "260"}, {"Stampede", "1,000", "1,395"}},
		Chart: &Chart{Kind: Lines, X: "buyers/s", Columns: []string{"all"}, Unit: "microseconds"},
	}
	svg, err := table.draw()
	require.NoError(t, err)
	assert.Subset(t, textsOf(t, svg), []string{"Echo", "Stampede"})
}

func TestChartOfUnknownColumnOrTextIsError(t *testing.T) {
	t.Parallel()
	for _, chart := range []Chart{
		{Kind: Bars, Columns: []string{"z"}},
		{Kind: Bars, Columns: []string{"x", "y"}},
		{Kind: "pie"},
		{Kind: Lines, X: "z", Columns: []string{"y"}},
		{Kind: Lines, X: "y", Columns: []string{"z"}},
		{Kind: Bars, Columns: []string{"text"}},
		{Kind: Lines, X: "y", Columns: []string{"text"}},
	} {
		table := Table{Head: []string{"x", "y", "text"}, Rows: [][]string{{"a", "1", "some (words)"}}, Chart: &chart}
		_, err := table.draw()
		assert.Error(t, err, "%+v", chart)
	}
}

// Each recorded picture shows the current figures of its page, and no picture is missing or left over.
func TestRecordedPicturesMatchPages(t *testing.T) {
	t.Parallel()
	const folder = "../../docs/bench"
	plots, err := Redraw(folder)
	require.NoError(t, err)
	recorded, err := filepath.Glob(filepath.Join(folder, "*.svg"))
	require.NoError(t, err)
	require.NotEmpty(t, recorded)
	require.Len(t, recorded, len(plots))
	for _, name := range recorded {
		svg, err := os.ReadFile(name)
		require.NoError(t, err)
		assert.Equal(t, string(plots[filepath.Base(name)]), string(svg), "%s: run task bench:plots", name)
	}
}

// WCAG 2.2, 1.4.3: minimum contrast of text and of what it names, on white and dark pages.
func TestColoursHaveEnoughContrast(t *testing.T) {
	t.Parallel()
	for _, c := range append([]colour{ink, others, ours}, series...) {
		assert.GreaterOrEqual(t, contrast(t, c.light, "#ffffff"), 4.5, c)
		assert.GreaterOrEqual(t, contrast(t, c.dark, "#0d1117"), 4.5, c)
	}
}

func contrast(t *testing.T, a, b string) float64 {
	t.Helper()
	x, y := luminance(t, a), luminance(t, b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

func luminance(t *testing.T, hex string) (sum float64) {
	t.Helper()
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		n, err := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
		require.NoError(t, err)
		v := float64(n) / 255
		if v <= 0.04045 {
			v /= 12.92
		} else {
			v = math.Pow((v+0.055)/1.055, 2.4)
		}
		sum += weight * v
	}
	return sum
}

func TestTicksEncloseTheValues(t *testing.T) {
	t.Parallel()
	assert.Equal(t, []float64{100, 200, 500, 1000, 2000}, logTicks([]float64{158, 1428}))
	assert.Equal(t, []float64{1000, 2000}, logTicks([]float64{1000}))
	assert.InDeltaSlice(t, []float64{0.2, 0.5, 1}, logTicks([]float64{0.3, 0.9}), 1e-9)
	assert.InDelta(t, 10_000, niceStep(45_000, 5), 0)
	assert.InDelta(t, 0.5, niceStep(2.1, 5), 1e-9)
}
