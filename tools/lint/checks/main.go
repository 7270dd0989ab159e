// Command checks is a vettool (go vet -vettool) with the analyzers that neither go vet nor staticcheck has: errors
// that are compared in a way that misses wrapped ones, errors that get lost, and lines that are too long. A line with
// the comment //nolint:NAME, or below one, is excepted from the analyzer of that name; the comment says why.
package main

import (
	"go/ast"
	"go/token"
	"strings"

	"github.com/gostaticanalysis/nilerr"
	"github.com/polyfloyd/go-errorlint/errorlint"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/unitchecker"
)

func main() {
	unitchecker.Main(exceptable(errorlint.NewAnalyzer()), exceptable(nilerr.Analyzer), lineLength)
}

// exceptable makes an analyzer leave out the lines with //nolint and its name.
func exceptable(a *analysis.Analyzer) *analysis.Analyzer {
	run := a.Run
	a.Run = func(pass *analysis.Pass) (any, error) {
		type place struct {
			file string
			line int
		}
		excepted := map[place]bool{}
		for _, file := range pass.Files {
			for _, group := range file.Comments {
				for _, comment := range group.List {
					if strings.HasPrefix(comment.Text, "//nolint:"+a.Name+" ") {
						at := pass.Fset.Position(comment.Pos())
						if isAlone(file, pass.Fset, comment) {
							at.Line++
						}
						excepted[place{at.Filename, at.Line}] = true
					}
				}
			}
		}
		report := pass.Report
		pass.Report = func(d analysis.Diagnostic) {
			if at := pass.Fset.Position(d.Pos); !excepted[place{at.Filename, at.Line}] {
				report(d)
			}
		}
		return run(pass)
	}
	return a
}

// isAlone is true for a comment on a line without code.
func isAlone(file *ast.File, fset *token.FileSet, comment *ast.Comment) bool {
	alone := true
	line := fset.Position(comment.Pos()).Line
	ast.Inspect(file, func(n ast.Node) bool {
		if _, isComment := n.(*ast.CommentGroup); n != nil && !isComment && fset.Position(n.End()).Line == line {
			alone = false
		}
		return alone
	})
	return alone
}
