package main

import (
	"encoding/json"
	"fmt"
	"io"
)

// outputFlag is for commands that print a result. Errors are text on standard error, whatever the format.
type outputFlag struct {
	Output string `default:"text" enum:"text,json" placeholder:"FORMAT" help:"Format of the result on standard output: text or json (${default}). Messages and errors are text on standard error."`
}

func (f outputFlag) json() bool { return f.Output == "json" }

// print prints v as a line of JSON, or else the text.
func (f outputFlag) print(w io.Writer, v any, format string, a ...any) error {
	if f.json() {
		return writeJSON(w, v)
	}
	_, err := fmt.Fprintf(w, format, a...)
	return err
}

// writeJSON prints v as one line of JSON: what every command prints with --output json.
func writeJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }
