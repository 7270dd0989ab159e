package sql

import (
	"embed"
	"io/fs"
	"strings"
	"sync"
)

//go:embed queries
var files embed.FS

// names has the name of each query, by its text.
var names = sync.OnceValue(func() map[string]string {
	named := map[string]string{}
	_ = fs.WalkDir(files, "queries", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := files.ReadFile(path)
		named[string(text)] = strings.TrimSuffix(strings.TrimPrefix(path, "queries/"), ".sql")
		return err
	}) // what is embedded can be read
	return named
})

// NameOf names a statement for people: by its file ("ledger/record_fresh"), or else by its first word ("COMMIT").
func NameOf(statement string) string {
	if name, known := names()[statement]; known {
		return name
	}
	word, _, _ := strings.Cut(strings.TrimSpace(statement), " ")
	return strings.TrimRight(word, ";")
}
