// Package arch holds the shape of this module: which package may import which, how long a file may
// be, that every package says what it is for, and what no file may call. Its test reads the sources
// with go/parser: a test that runs the go command instead is cached, and stays green.
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
	"strconv"
	"strings"
)

// Check reads all Go files of the module in root, without nested modules, and returns what is
// against the rules: one line each, with the file, in the order of the files. The tests of a package may
// import what they like; all other rules hold for them too.
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
	return "", fmt.Errorf("%s/go.mod names no module", root)
}

type checker struct {
	root   fs.FS
	module string
	found  []string
	// packages are the folders with files that are not tests, each once.
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

// isForeign tells folders that the go command would not take for a part of this module.
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
		return nil
	}
	folder := path.Dir(name)
	if _, seen := c.documented[folder]; !seen {
		c.packages = append(c.packages, folder)
	}
	c.documented[folder] = c.documented[folder] || file.Doc != nil
	c.imports(name, file)
	return nil
}

func (c *checker) imports(name string, file *ast.File) {
	from := path.Dir(name)
	for _, spec := range file.Imports {
		to, ours := strings.CutPrefix(importPath(spec), c.module+"/")
		if !ours {
			continue
		}
		if why := refuse(from, to); why != "" {
			c.report(name, "%s imports %s, which %s", from, to, why)
		}
	}
}

func (c *checker) calls(name string, files *token.FileSet, file *ast.File) {
	called := map[string]string{} // by the name that the file gives it
	for _, spec := range file.Imports {
		imported := importPath(spec)
		alias := path.Base(imported)
		if spec.Name != nil {
			alias = spec.Name.Name
		}
		called[alias] = imported
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
			if called[pkg.Name] == b.pkg && selector.Sel.Name == b.function && mayCall[name] != call {
				c.report(name, "line %d calls %s: %s", files.Position(selector.Pos()).Line, call, b.instead)
			}
		}
		return true
	})
}

func importPath(spec *ast.ImportSpec) string {
	imported, _ := strconv.Unquote(spec.Path.Value) // the parser has checked it
	return imported
}
