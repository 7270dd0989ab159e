package order

import (
	"strings"

	"github.com/google/uuid"
)

// MaxTraces bounds the traces of one message.
const MaxTraces = 16

// parentChars is the length of a traceparent of W3C Trace Context, version 00.
const parentChars = 55

// Trace is a purchase that is traced. One call of the script decides many purchases, so a message holds orders of many
// traces: its metadata has one traceparent for stock subscribers, and a line for each traced purchase.
type Trace struct {
	// Order is the CompactID that the order gets if the purchase wins. Losers have a line too: the metadata is written
	// before the script decides.
	Order string
	// Parent is the traceparent below which the order is recorded.
	Parent string
}

// textOf returns the lines of at most MaxTraces traces: the order's id, a space, and the traceparent.
func textOf(traces []Trace) string {
	var text strings.Builder
	for i, t := range traces[:min(len(traces), MaxTraces)] {
		if i > 0 {
			_ = text.WriteByte('\n') // never fails
		}
		_, _ = text.WriteString(t.Order + " " + t.Parent)
	}
	return text.String()
}

// tracesIn reads the lines of textOf. It leaves out what is damaged: without its trace an order is as good.
func tracesIn(text string) map[uuid.UUID]string {
	if text == "" {
		return nil
	}
	traces := make(map[uuid.UUID]string)
	for line := range strings.SplitSeq(text, "\n") {
		id, parent, _ := strings.Cut(line, " ")
		if of, err := ParseCompactID(id); err == nil && isTraceParent(parent) && len(traces) < MaxTraces {
			traces[of] = parent
		}
	}
	return traces
}

// isTraceParent reports whether text may be a traceparent of version 00: it can be stored and sent as it is. Who
// uses it reads it.
func isTraceParent(text string) bool {
	return len(text) == parentChars && strings.HasPrefix(text, "00-") && strings.Trim(text, "0123456789abcdef-") == ""
}

// TracesOf returns the traces of events, at most MaxTraces.
func TracesOf(events ...OrderReserved) (traces []Trace) {
	for _, e := range events {
		if e.TraceParent != "" && len(traces) < MaxTraces {
			traces = append(traces, Trace{CompactID(e.OrderID), e.TraceParent})
		}
	}
	return traces
}
