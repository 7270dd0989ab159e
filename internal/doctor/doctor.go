// Package doctor looks for settings of Redis and Postgres under which Stampede cannot keep what it
// promises, and tells how to mend them.
package doctor

import (
	"fmt"
	"io"
	"slices"
)

// Severity says what a finding means for the promises.
type Severity string

const (
	// Unsafe: a promise does not hold under this setting.
	Unsafe Severity = "unsafe"
	// Warning: the promises hold, with a limit that somebody should have decided on.
	Warning Severity = "warning"
	// Unchecked: the server does not tell.
	Unchecked Severity = "unchecked"
	// Away: the server does not answer, so nothing of it was looked at.
	Away Severity = "away"
)

// Finding is one thing that should be otherwise.
type Finding struct {
	Severity Severity `json:"severity"`
	// Server is "redis" or "postgres".
	Server string `json:"server"`
	What   string `json:"what"`
	Why    string `json:"why"`
	Mend   string `json:"mend"`
}

// Any tells whether there is a finding of that severity.
func Any(findings []Finding, severity Severity) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == severity })
}

// WriteText prints the findings for people.
func WriteText(w io.Writer, findings []Finding) error {
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-9s  %s: %s\n           why:  %s\n           mend: %s\n", f.Severity, f.Server, f.What,
			f.Why, f.Mend); err != nil {
			return err
		}
	}
	if len(findings) > 0 {
		return nil
	}
	_, err := fmt.Fprintln(w, "Redis and Postgres are set up to keep every promise.")
	return err
}
