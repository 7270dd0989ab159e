// Command checks is a vettool (go vet -vettool) with the analyzers of go vet, and with some that go vet and staticcheck
// lack: comparisons that miss wrapped errors, lost errors, and long lines. The comment //nolint:NAME excepts its line,
// or the line below it, from the additional analyzer of that name; the comment gives the reason.
package main

import (
	"bytes"
	"go/ast"
	"go/token"
	"strings"
	"unicode/utf8"

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
