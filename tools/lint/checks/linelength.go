package main

import (
	"bytes"
	"go/ast"
	"unicode/utf8"

	"golang.org/x/tools/go/analysis"
)

// lineMax is how many characters fit on a screen that shows two files side by side.
const lineMax = 120

// tabWidth is that of gofmt.
const tabWidth = 4

var lineLength = &analysis.Analyzer{
	Name: "linelength",
	Doc:  "report lines of more than 120 characters",
	Run: func(pass *analysis.Pass) (any, error) {
		for _, file := range pass.Files {
			if ast.IsGenerated(file) {
				continue
			}
			at := pass.Fset.File(file.Package)
			source, err := pass.ReadFile(at.Name())
			if err != nil {
				return nil, err
			}
			line := 0
			for text := range bytes.Lines(source) {
				if line++; width(bytes.TrimRight(text, "\n")) > lineMax {
					pass.Reportf(at.LineStart(line), "the line has %d characters, want at most %d", width(bytes.TrimRight(text, "\n")), lineMax)
				}
			}
		}
		return nil, nil
	},
}

func width(line []byte) int {
	return utf8.RuneCount(line) + (tabWidth-1)*bytes.Count(line, []byte("\t"))
}
