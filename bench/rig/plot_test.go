package rig

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// textsOf are the texts of an SVG, which must be well-formed.
func textsOf(t *testing.T, svg []byte) []string {
	t.Helper()
	if folder := os.Getenv("STAMPEDE_BENCH_PLOTS"); folder != "" { // to look at them
		require.NoError(t, os.WriteFile(filepath.Join(folder, t.Name()+".svg"), svg, 0o600))
	}
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
				texts = append(texts, strings.TrimSpace(string(token)))
			}
		}
	}
}

func TestBarsNameEachCandidateAndItsMedian(t *testing.T) {
	t.Parallel()
	svg := Bars(t, "Title", "orders/s", Count, []Bar{
		{Name: "ours", Spread: Spread{N: 5, Median: 40_000, Min: 38_000, Max: 45_000}, Ours: true},
		{Name: "other", Spread: Spread{N: 5, Median: 1500, Min: 1200, Max: 1600}},
		{Name: "none"},
	})
	texts := textsOf(t, svg)
	for _, want := range []string{"Title", "orders/s", "ours", "other", "none", "40,000", "1,500", "–"} {
		assert.Contains(t, texts, want)
	}
	assert.Less(t, len(svg), 16<<10)
	assert.Nil(t, Bars(t, "Title", "orders/s", Count, nil), "nothing to draw, where -only left none")
}

func TestLinesHaveLogarithmicAxes(t *testing.T) {
	t.Parallel()
	svg := Lines(t, "Title", "buyers", "bytes", []Line{
		{"a", []Point{{1_000, Spread{3, 90, 80, 100}}, {10_000, Spread{3, 900, 800, 1000}}, {1_000_000, Spread{3, 90_000, 80_000, 100_000}}}},
		{"b", []Point{{1_000, Spread{}}, {10_000, Spread{3, 700, 700, 700}}}},
	})
	texts := textsOf(t, svg)
	for _, want := range []string{"Title", "buyers", "bytes", "a", "b", "1,000", "10,000", "1,000,000"} {
		assert.Contains(t, texts, want)
	}
	assert.Less(t, len(svg), 16<<10)
}
