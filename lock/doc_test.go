package lock_test

import (
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The page of the lock lists each exported function as it is declared, and its other code is part
// of an example.
func TestDocumentationListsSignaturesAndExamples(t *testing.T) {
	page, err := os.ReadFile("../docs/lock.md")
	require.NoError(t, err)
	var listed []string
	examples := exampleLines(t)
	for _, block := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		if !strings.HasPrefix(block[1], "func ") {
			assert.Contains(t, examples, trimLines(block[1]))
			continue
		}
		for signature := range strings.SplitSeq("\n"+block[1], "\nfunc ") {
			if signature != "" {
				listed = append(listed, oneLine("func "+signature))
			}
		}
	}
	assert.ElementsMatch(t, signatures(t), listed)
}

// signatures are the exported functions and methods of the package, but for those of errors.
func signatures(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var all []string
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !f.Name.IsExported() {
				continue
			}
			f.Body = nil
			var text strings.Builder
			require.NoError(t, printer.Fprint(&text, set, f))
			all = append(all, oneLine(text.String()))
		}
	}
	return slices.DeleteFunc(all, func(signature string) bool {
		return strings.Contains(signature, "*LostError)")
	})
}

func oneLine(signature string) string {
	text := strings.Join(strings.Fields(signature), " ")
	return strings.NewReplacer("( ", "(", ", )", ")").Replace(text)
}

func exampleLines(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	return trimLines(string(text))
}

func trimLines(text string) string {
	var all strings.Builder
	for line := range strings.Lines(text) {
		all.WriteString(strings.TrimSpace(line) + "\n")
	}
	return all.String()
}
