// Package doctor finds settings of Redis and Postgres under which Stampede cannot keep its promises,
// and how to correct them.
package doctor

import (
	"fmt"
	"io"
	"slices"
)

// Severity is what a finding means for the promises.
type Severity string

const (
	// Unsafe: a promise does not hold under this setting.
	Unsafe Severity = "unsafe"
	// Warning: the promises hold, with a limit that should be a decision.
	Warning Severity = "warning"
	// Unchecked: the setting could not be read.
	Unchecked Severity = "unchecked"
	// Away: the server does not answer, so it was not checked.
	Away Severity = "away"
)

// Finding is one problem.
type Finding struct {
	Severity Severity `json:"severity"`
	// Server is "redis" or "postgres".
	Server string `json:"server"`
	// Node has the addresses of the nodes of a cluster that it is about; empty for a server of its own and for the
	// whole cluster.
	Node string `json:"node,omitempty"`
	What string `json:"what"`
	Why  string `json:"why"`
	Mend string `json:"mend"`
}

// Where names the server, and the nodes of a cluster.
func (f Finding) Where() string {
	if f.Node == "" {
		return f.Server
	}
	return f.Server + " " + f.Node
}

// Any reports whether there is a finding of that severity.
func Any(findings []Finding, severity Severity) bool {
	return slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == severity })
}

// WriteText prints the findings as text.
func WriteText(w io.Writer, findings []Finding) error {
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%-9s  %s: %s\n           why:  %s\n           mend: %s\n", f.Severity, f.Where(),
			f.What, f.Why, f.Mend); err != nil {
			return err
		}
	}
	if len(findings) > 0 {
		return nil
	}
	_, err := fmt.Fprintln(w, "The settings of Redis and Postgres keep every promise.")
	return err
}
