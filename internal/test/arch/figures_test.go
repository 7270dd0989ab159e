package arch_test

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFiguresStayLow holds what a change costs, and what somebody gets who embeds a room. Lower a bound when the figure
// falls; `task figures` prints them.
func TestFiguresStayLow(t *testing.T) {
	t.Parallel()
	files := sources(t)
	goFiles, lines, imports, ofTerm := 0, 0, 0, 0
	for path, text := range files {
		if isSource(path) && namesTerm(text) {
			ofTerm++
		}
		if strings.HasSuffix(path, ".go") {
			goFiles, lines, imports = goFiles+1, lines+bytes.Count(text, []byte("\n")), imports+importLines(text)
		}
	}
	hold := func(what string, figure, most int) {
		t.Helper()
		t.Logf("%5d of %d  %s", figure, most, what)
		require.LessOrEqual(t, figure, most, what)
	}
	hold("files of Go", goFiles, 560)
	hold("lines of imports, of 1000 lines of Go", imports*1000/lines, 56)
	hold("files that a term of a sale stands in, three of them generated, without its effects, tests and docs", ofTerm, 14)
	for room, most := range map[string]int{"lock": 19, "reservation": 112, "ingress": 165} {
		list := exec.CommandContext(t.Context(), "go", "list", "-deps",
			"-f", "{{if not (or .Standard .Module.Main)}}{{.ImportPath}}{{end}}", "./"+room)
		list.Dir = root
		out, err := list.Output()
		require.NoError(t, err)
		hold("packages of other modules that "+room+" brings", len(strings.Fields(string(out))), most)
	}
}

const root = "../../.."

// built are the folders of what tasks build and install.
var built = []string{"bin", "build", "dist", "node_modules"}

// sources returns the text of each file that a person or a generator writes, by its path.
func sources(t *testing.T) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != root && (strings.HasPrefix(name, ".") || slices.Contains(built, name)):
			return filepath.SkipDir
		case !entry.Type().IsRegular():
			return nil
		}
		relative, err := filepath.Rel(root, path)
		if err == nil {
			files[relative], err = os.ReadFile(path)
		}
		return err
	})
	require.NoError(t, err)
	return files
}

// isSource is true for a file in which a term has to be written: not for tests, docs and examples, nor for the
// statements of what payments_per_second does.
func isSource(path string) bool {
	for _, suffix := range []string{"_test.go", ".md", ".test.ts", ".patch", ".toml"} {
		if strings.HasSuffix(path, suffix) {
			return false
		}
	}
	return !strings.Contains(path, "/tests/") && !strings.HasPrefix(path, "examples/") &&
		!strings.HasPrefix(path, "sql/queries/ledger/")
}

func namesTerm(text []byte) bool {
	return bytes.Contains(text, []byte("payments_per_second")) || bytes.Contains(text, []byte("PaymentsPerSecond"))
}

func importLines(text []byte) (n int) {
	inside := false
	for line := range bytes.Lines(text) {
		inside = inside || bytes.HasPrefix(line, []byte("import ("))
		if inside || bytes.HasPrefix(line, []byte("import ")) {
			n++
		}
		inside = inside && !bytes.Equal(line, []byte(")\n"))
	}
	return n
}
