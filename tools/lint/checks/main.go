// Command checks is a vettool (go vet -vettool) with the analyzers of go vet, and with some that go vet and staticcheck
// lack: comparisons that miss wrapped errors, lost errors, and long lines. The comment //nolint:NAME excepts its line,
// or the line below it, from the additional analyzer of that name; the comment gives the reason.
package main

import (
	"go/ast"
	"go/token"
	"strings"

	"github.com/gostaticanalysis/nilerr"
	"github.com/polyfloyd/go-errorlint/errorlint"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/suite/vet"
	"golang.org/x/tools/go/analysis/unitchecker"
)

func main() {
	unitchecker.Main(append(vet.Suite, exceptable(errorlint.NewAnalyzer()), exceptable(nilerr.Analyzer), lineLength)...)
}

// exceptable makes an analyzer respect //nolint with its name.
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

// isAlone reports whether a comment is on a line without code.
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
