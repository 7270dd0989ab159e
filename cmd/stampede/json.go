package main

import (
	"encoding/json"
	"io"
)

// writeJSON prints v as one line of JSON: what every command prints with --json.
func writeJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }
