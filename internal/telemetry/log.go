// Package telemetry provides a process's logs, metrics, health checks and build version.
package telemetry

import (
	"fmt"
	"io"
	"log/slog"
)

// The formats of a log.
const (
	formatText = "text"
	formatJSON = "json"
)

// NewLogger returns a logger that writes to w, one line per record, in the format text or json. Level
// is the lowest level to write: debug, info, warn or error, in upper or lower case.
func NewLogger(w io.Writer, format, level string) (*slog.Logger, error) {
	var lowest slog.Level
	if err := lowest.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: lowest, ReplaceAttr: plain}
	switch format {
	case formatText:
		return slog.New(withTrace{slog.NewTextHandler(w, options)}), nil
	case formatJSON:
		return slog.New(withTrace{slog.NewJSONHandler(w, options)}), nil
	}
	return nil, fmt.Errorf("log format %q: want %s or %s", format, formatText, formatJSON)
}

// plain writes an error as its message: the text format would write the stack of some errors. It leaves out the
// trace of what is not traced.
func plain(_ []string, a slog.Attr) slog.Attr {
	if a.Key == traceID && a.Value.String() == "" {
		return slog.Attr{}
	}
	if err, ok := a.Value.Any().(error); ok {
		a.Value = slog.StringValue(err.Error())
	}
	return a
}
