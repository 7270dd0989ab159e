package main

import (
	"bytes"
	"go/ast"
	"unicode/utf8"

	"golang.org/x/tools/go/analysis"
)

// lineMax is how many characters a line may have.
const lineMax = 120

var lineLength = &analysis.Analyzer{
	Name: "linelength",
	Doc:  "report lines of more than 120 characters, but for the tags of fields and literals of more than 60",
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
			tagged := map[int]bool{}
			ast.Inspect(file, func(n ast.Node) bool {
				if field, ok := n.(*ast.Field); ok && field.Tag != nil {
					tagged[in.Line(field.Tag.Pos())] = true
				}
				if text, ok := n.(*ast.BasicLit); ok && len(text.Value) > 60 {
					for line := in.Line(text.Pos()); line <= in.Line(text.End()); line++ {
						tagged[line] = true
					}
				}
				return true
			})
			line := 0
			for text := range bytes.Lines(source) {
				line++
				if n := utf8.RuneCount(bytes.TrimRight(text, "\n")); n > lineMax && !tagged[line] {
					pass.Reportf(in.LineStart(line), "the line has %d characters, want at most %d", n, lineMax)
				}
			}
		}
		return nil, nil
	},
}
