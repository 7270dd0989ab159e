// Package arch checks the structure of this module: allowed imports, the length of files, package comments, banned
// calls, and texts that one file owns. Its test reads the sources with go/parser. If it ran the go command instead, Go
// would cache its result and miss changes.
package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Check reads all Go files of the module in root, without nested modules, and returns one line per violation,
// with the file, in the order of the files. Test files may import any package; all other rules apply to them too.
func Check(root string) ([]string, error) {
	module, err := moduleName(root)
	if err != nil {
		return nil, err
	}
	c := &checker{root: os.DirFS(root), module: module, documented: map[string]bool{}}
	if err := fs.WalkDir(c.root, ".", c.visit); err != nil {
		return nil, err
	}
	for _, folder := range c.packages {
		if !c.documented[folder] {
			c.report(folder, "no file of the package has a package comment")
		}
	}
	return c.found, nil
}

func moduleName(root string) (string, error) {
	source, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(source)) {
		if name, ok := strings.CutPrefix(line, "module "); ok {
			return strings.TrimSpace(name), nil
		}
	}
	return "", fmt.Errorf("%s/go.mod has no module line", root)
}

type checker struct {
	root   fs.FS
	module string
	found  []string
	// packages are the folders with non-test files.
	packages   []string
	documented map[string]bool
}

func (c *checker) report(where, format string, args ...any) {
	c.found = append(c.found, where+": "+fmt.Sprintf(format, args...))
}

func (c *checker) visit(name string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	if entry.IsDir() {
		if c.isForeign(name) {
			return fs.SkipDir
		}
		return nil
	}
	if path.Ext(name) != ".go" {
		return nil
	}
	source, err := fs.ReadFile(c.root, name)
	if err != nil {
		return err
	}
	return c.file(name, source)
}

// isForeign reports whether a folder is not part of this module for the go command.
func (c *checker) isForeign(folder string) bool {
	if folder == "." {
		return false
	}
	base := path.Base(folder)
	if base == "testdata" || base == "vendor" || base[0] == '.' || base[0] == '_' {
		return true
	}
	_, err := fs.Stat(c.root, path.Join(folder, "go.mod"))
	return err == nil
}

func (c *checker) file(name string, source []byte) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if n := bytes.Count(source, []byte("\n")); n > fileLinesMax {
		c.report(name, "%d lines, want at most %d", n, fileLinesMax)
	}
	c.calls(name, files, file)
	if strings.HasSuffix(name, "_test.go") {
		c.tier(name, file)
		return nil
	}
	folder := path.Dir(name)
	if _, seen := c.documented[folder]; !seen {
		c.packages = append(c.packages, folder)
	}
	c.documented[folder] = c.documented[folder] || file.Doc != nil
	c.imports(name, file)
	if findRoom(folder) != tests {
		c.texts(name, files, file)
	}
	return nil
}

// tier checks that task test:system, which takes the tests of the files whose constraint begins with the tag system,
// takes all that only run with that tag.
func (c *checker) tier(name string, file *ast.File) {
	var constraint string
	for _, comments := range file.Comments {
		if text, found := strings.CutPrefix(comments.List[0].Text, "//go:build "); found {
			constraint = text
		}
	}
	if !slices.Contains(strings.FieldsFunc(constraint, func(r rune) bool { return !unicode.IsLetter(r) }), "system") {
		return
	}
	if !strings.HasPrefix(constraint, "system") {
		c.report(name, "the constraint %q does not begin with system: no task runs these tests", constraint)
	}
	for _, declared := range file.Decls {
		f, ok := declared.(*ast.FuncDecl)
		if ok && (strings.HasPrefix(f.Name.Name, "Benchmark") || strings.HasPrefix(f.Name.Name, "Fuzz")) {
			c.report(name, "%s has the tag system: no task runs it", f.Name.Name)
		}
	}
}

func (c *checker) imports(name string, file *ast.File) {
	from := path.Dir(name)
	for _, spec := range file.Imports {
		to, inModule := strings.CutPrefix(importPath(spec), c.module+"/")
		if !inModule {
			continue
		}
		if why := violation(from, to); why != "" {
			c.report(name, "%s imports %s, which %s", from, to, why)
		}
	}
}

func (c *checker) calls(name string, files *token.FileSet, file *ast.File) {
	imports := map[string]string{} // paths by local name
	for _, spec := range file.Imports {
		imported := importPath(spec)
		alias := path.Base(imported)
		if spec.Name != nil {
			alias = spec.Name.Name
		}
		imports[alias] = imported
	}
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		pkg, ok := selector.X.(*ast.Ident)
		if !ok {
			return true
		}
		for _, b := range banned {
			call := b.pkg + "." + b.function
			if imports[pkg.Name] == b.pkg && selector.Sel.Name == b.function && mayCall[name] != call {
				c.report(name, "line %d calls %s: %s", files.Position(selector.Pos()).Line, call, b.instead)
			}
		}
		return true
	})
}

func (c *checker) texts(name string, files *token.FileSet, file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		literal, ok := n.(*ast.BasicLit)
		for _, o := range owned {
			if ok && strings.Contains(literal.Value, o.text) && name != o.file {
				c.report(name, "line %d has %s: %s", files.Position(literal.Pos()).Line, o.text, o.instead)
			}
		}
		return true
	})
}

func importPath(spec *ast.ImportSpec) string {
	imported, _ := strconv.Unquote(spec.Path.Value) // valid after parsing
	return imported
}

// fileLinesMax bounds a file: a longer one usually has more than one purpose.
const fileLinesMax = 550

// rooms are the top-level folders in the order of their layers, each with the rooms above it in this list that it may
// import. The stores come first, the roles after them. No role imports another: they communicate only through Redis
// and Postgres, so that each runs without the others.
var rooms = []room{
	{"docs", nil},
	{"lua", nil},
	{"sql", nil},
	{libraries, []string{"sql"}},
	{"lock", []string{"lua"}},
	{"reservation", []string{"lua", "sql", libraries}},
	{"draw", []string{"reservation"}},
	{"stream", []string{"lua", "reservation", libraries}},
	{"ledger", []string{"sql", "reservation", "draw", "stream", libraries}},
	{"upkeep", []string{"lua", "sql", "reservation", "draw", "stream", "ledger", libraries}},
	{"ingress", []string{"reservation", "draw", "ledger", libraries}},
	{"fulfillment", []string{"sql", "lock", "reservation", "stream", "ledger", "upkeep", libraries}},
	{events, []string{"sql", "reservation", libraries}},
	{targets, []string{"sql", events}},
	{"relay", []string{"sql", "lock", "reservation", events, targets, libraries}},
	{"dashboard", []string{"docs", "sql", "reservation", "draw", "stream", "ledger", targets, "upkeep", libraries}},
	{client, []string{"reservation", "draw", "ledger", libraries}},
	{development, []string{"sql", "reservation", "draw", "stream", "ledger", "upkeep", client, libraries}},
	{"cmd", []string{
		"sql", "reservation", "draw", "ledger", "upkeep", "ingress", "fulfillment", targets, "relay", "dashboard",
		client, development, libraries,
	}},
}

type room struct {
	name string
	may  []string
}

const (
	libraries = "internal"
	// events and targets are the relay's side of Postgres.
	events, targets = "relay/feed", "relay/target"
	// client is the client of the HTTP API.
	client = "internal/apiclient"
	// development is what runs the product on one machine, and a crowd against it.
	development = "internal/dev"
	// tests is never part of a program, and may import every room.
	tests = "internal/test"
)

// banned are functions that no file may call, each with its alternative.
var banned = []struct{ pkg, function, instead string }{
	{"context", "TODO", "pass the caller's context"},
	{"time", "Sleep", "wait for a state, or for a timer and the context"},
}

// mayCall exempts the loop that waits for a state in all tests.
var mayCall = map[string]string{"internal/test/testkit/testkit.go": "time.Sleep"}

// owned are texts that the programs have in one file, each with what others call.
var owned = []struct{ text, file, instead string }{
	{"text/event-stream", "internal/accept/server.go", "call accept.EventStream, so that no gateway holds the stream back"},
}

// violation returns why package from may not import package to, "" if it may.
func violation(from, to string) string {
	importer, imported := findRoom(from), findRoom(to)
	here := slices.IndexFunc(rooms, func(r room) bool { return r.name == importer })
	switch {
	case importer == imported || importer == tests:
		return ""
	case imported == tests:
		return "is for tests only"
	case here < 0:
		return "needs a rule in internal/test/arch: this room has none"
	case !slices.Contains(rooms[here].may, imported),
		!slices.ContainsFunc(rooms[:here], func(r room) bool { return r.name == imported }):
		return "points the wrong way"
	}
	return ""
}

// findRoom returns the room of a package.
func findRoom(folder string) string {
	for _, nested := range []string{client, development, tests, events, targets} {
		if strings.HasPrefix(folder+"/", nested+"/") {
			return nested
		}
	}
	top, _, _ := strings.Cut(folder, "/")
	return top
}
