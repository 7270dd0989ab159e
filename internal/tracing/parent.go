package tracing

import (
	"encoding/hex"

	"go.opentelemetry.io/otel/trace"
)

const (
	// parentLength is that of a traceparent of version 00: version, trace id, span id and flags, in hexadecimal.
	parentLength = 2 + 1 + 32 + 1 + 16 + 1 + 2
	// parentMax bounds a traceparent of a later version, which may be longer.
	parentMax = 256
)

// Sampled reports whether text is a valid traceparent (W3C Trace Context, level 1) of a trace that is recorded.
func Sampled(text string) bool {
	_, ok := parse(text)
	return ok
}

// ID returns the id of the trace of a sampled traceparent, "" of anything else.
func ID(text string) string {
	if parent, sampled := parse(text); sampled {
		return parent.TraceID().String()
	}
	return ""
}

// parse returns the context of a sampled parent. It does not allocate.
func parse(text string) (parent trace.SpanContext, sampled bool) {
	if len(text) < parentLength || len(text) > parentMax || text[2] != '-' || text[35] != '-' || text[52] != '-' {
		return parent, false
	}
	var version, flags [1]byte
	var config trace.SpanContextConfig
	if !decode(version[:], text[:2]) || !decode(config.TraceID[:], text[3:35]) || !decode(config.SpanID[:], text[36:52]) ||
		!decode(flags[:], text[53:55]) {
		return parent, false
	}
	longer := len(text) > parentLength
	if version[0] == 0xff || version[0] == 0 && longer || longer && text[parentLength] != '-' {
		return parent, false
	}
	config.TraceFlags, config.Remote = trace.TraceFlags(flags[0])&trace.FlagsSampled, true
	parent = trace.NewSpanContext(config)
	return parent, parent.IsValid() && parent.IsSampled()
}

// decode reads hexadecimal digits in lower case.
func decode(dst []byte, digits string) bool {
	for i := range len(digits) {
		if c := digits[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	n, err := hex.Decode(dst, []byte(digits))
	return err == nil && n == len(dst)
}
