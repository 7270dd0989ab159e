package main

import (
	"bytes"
	"go/ast"
	"unicode/utf8"

	"golang.org/x/tools/go/analysis"
)

// lineMax is the largest length of a line, in characters.
const lineMax = 120

var lineLength = &analysis.Analyzer{
	Name: "linelength",
	Doc:  "report lines of more than 120 characters, except field tags and literals of more than 60",
	Run: func(pass *analysis.Pass) (any, error) {
		for _, file := range pass.Files {
			if ast.IsGenerated(file) {
				continue
			}
			in := pass.Fset.File(file.Package)
			source, err := pass.ReadFile(in.Name())
			if err != nil {
				return nil, err
			}
			excepted := map[int]bool{}
			ast.Inspect(file, func(n ast.Node) bool {
				if field, ok := n.(*ast.Field); ok && field.Tag != nil {
					excepted[in.Line(field.Tag.Pos())] = true
				}
				if text, ok := n.(*ast.BasicLit); ok && len(text.Value) > 60 {
					for line := in.Line(text.Pos()); line <= in.Line(text.End()); line++ {
						excepted[line] = true
					}
				}
				return true
			})
			line := 0
			for text := range bytes.Lines(source) {
				line++
				if n := utf8.RuneCount(bytes.TrimRight(text, "\n")); n > lineMax && !excepted[line] {
					pass.Reportf(in.LineStart(line), "%d characters, want at most %d", n, lineMax)
				}
			}
		}
		return nil, nil
	},
}
