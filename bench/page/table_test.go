package page

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFiguresKeepLastRunOfEachTable(t *testing.T) {
	t.Parallel()
	var f Figures
	f.Put(Table{Title: "A", Note: "Warm-up.", Head: []string{"x"}, Rows: [][]string{{"0"}}})
	f.Put(Table{Title: "B", Note: "Other.", Head: []string{"x"}})
	f.Put(Table{
		Title: "A", Note: "Note.", Head: []string{"x", "y"}, Rows: [][]string{{"1", "2"}},
		Plot: "a.svg", Chart: &Chart{Kind: Bars, Columns: []string{"y"}, Unit: "z"},
	})
	text, plots, err := f.Write()
	require.NoError(t, err)
	assert.Equal(t, "### A\n\nNote.\n\n| x | y |\n| --- | --- |\n| 1 | 2 |\n\n"+
		`<!-- chart {"kind":"bars",`+"\n"+`"columns":["y"],"unit":"z"} -->`+"\n![A](a.svg)\n\n"+
		"### B\n\nOther.\n\n| x |\n| --- |\n\n", text)
	assert.Contains(t, plots, "a.svg")
}

func TestReplaceWritesOnlyBetweenMarkers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "figures.md")
	require.NoError(t, os.WriteFile(path, []byte("before\n"+figuresBegin+"old\n"+figuresEnd+"after\n"), 0o600))
	for range 2 {
		require.NoError(t, Replace(path, "new\n\n"))
		written, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, "before\n"+figuresBegin+"\nnew\n\n"+figuresEnd+"after\n", string(written))
	}

	require.NoError(t, os.WriteFile(path, []byte("nothing\n"), 0o600))
	require.ErrorContains(t, Replace(path, "new"), "has no place for figures")
}

func TestReplaceWrapsProse(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "figures.md")
	require.NoError(t, os.WriteFile(path, []byte(figuresBegin+figuresEnd), 0o600))
	long := strings.Repeat("µ", 60)
	require.NoError(t, Replace(path, "### A\n\n"+long+" "+long+"\n\n| "+long+" | "+long+" |\n"))
	written, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Contains(t, string(written), "\n"+long+"\n"+long+"\n\n| "+long+" | "+long+" |\n")
}
