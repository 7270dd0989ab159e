package rig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPageKeepsLastRunOfEachTable(t *testing.T) {
	t.Parallel()
	var p page
	p.put(Table{Title: "A", Note: "Warm-up.", Head: []string{"x"}, Rows: [][]string{{"0"}}})
	p.put(Table{Title: "B", Note: "Other.", Head: []string{"x"}})
	p.put(Table{Title: "A", Note: "Note.", Head: []string{"x", "y"}, Rows: [][]string{{"1", "2"}}})
	assert.Equal(t, "### A\n\nNote.\n\n| x | y |\n| --- | --- |\n| 1 | 2 |\n\n"+
		"### B\n\nOther.\n\n| x |\n| --- |\n\n", p.markdown())
}

func TestBarsAreProportional(t *testing.T) {
	t.Parallel()
	var p page
	p.put(Table{Head: []string{"x", "ms", "y"}, Bars: 1, Rows: [][]string{
		{"a", "1,600 ms", "1"}, {"b", "450 ms (1–2)", "2"}, {"c", "0.10 ms", "3"}, {"d", none, "4"},
	}})
	assert.Contains(t, p.markdown(), "| x | ms |  | y |\n| --- | --- | --- | --- |\n"+
		"| a | 1,600 ms | ████████████ | 1 |\n| b | 450 ms (1–2) | ███▍ | 2 |\n"+
		"| c | 0.10 ms | ▏ | 3 |\n| d | – |  | 4 |\n")
}

func TestReplaceWritesOnlyBetweenMarkers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "figures.md")
	require.NoError(t, os.WriteFile(path, []byte("before\n"+figuresBegin+"old\n"+figuresEnd+"after\n"), 0o600))
	for range 2 {
		require.NoError(t, replaceFigures(path, "new\n\n"))
		written, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, "before\n"+figuresBegin+"\nnew\n\n"+figuresEnd+"after\n", string(written))
	}

	require.NoError(t, os.WriteFile(path, []byte("nothing\n"), 0o600))
	require.ErrorContains(t, replaceFigures(path, "new"), "has no place for figures")
}

func TestProseIsWrapped(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("µ", 60)
	table := "\n\n| " + long + " | " + long + " |\n"
	assert.Equal(t, "### A\n\n"+long+"\n"+long+table, wrap("### A\n\n"+long+" "+long+table))
}
