// Command checks is a vettool (go vet -vettool) with the analyzers that neither go vet nor staticcheck has: errors
// that are compared or wrapped in a way that misses wrapped ones, errors that get lost, and lines that are too long.
package main

import (
	"github.com/gostaticanalysis/nilerr"
	"github.com/polyfloyd/go-errorlint/errorlint"
	"golang.org/x/tools/go/analysis/unitchecker"
)

func main() {
	unitchecker.Main(errorlint.NewAnalyzer(), nilerr.Analyzer, lineLength)
}
