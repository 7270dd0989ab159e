package sql_test

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// queries.go has a variable for each file, in the order of the files, with a name made from its path.
func TestQueriesAreNamedAfterTheirFiles(t *testing.T) {
	t.Parallel()
	files := queryFiles(t)
	source, err := os.ReadFile("queries.go")
	require.NoError(t, err)
	var embedded []string
	for _, found := range regexp.MustCompile(`//go:embed (\S+)\n\t(\w+) string\n`).FindAllStringSubmatch(string(source),
		-1) {
		path, name := found[1], found[2]
		embedded = append(embedded, path)
		words := strings.NewReplacer("queries/", "", "/", "", "_", "", ".sql", "").Replace(path)
		require.Equal(t, words, strings.ToLower(name), path)
	}
	require.Equal(t, files, embedded)
}

// queryFiles returns the files of all queries.
func queryFiles(t *testing.T) (files []string) {
	t.Helper()
	require.NoError(t, fs.WalkDir(os.DirFS("."), "queries", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	return files
}
