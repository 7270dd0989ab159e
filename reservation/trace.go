package reservation

import (
	"stampede/internal/tracing"
	"stampede/reservation/order"
)

// tracedCall holds the spans of one call of the script, one for each traced purchase in it: each is in the trace of its
// purchase. The first one has links to the requests of the others, and the others have a link to it.
type tracedCall struct {
	spans  []tracing.Span
	traces []order.Trace
}

// traceCall starts the spans of a call. It returns nil if no purchase in it is traced, as nearly always.
func traceCall(t *target, batch []*call) *tracedCall {
	var traced []*call
	for _, c := range batch {
		if c.span.On() && len(traced) < order.MaxTraces {
			traced = append(traced, c)
		}
	}
	if traced == nil {
		return nil
	}
	others := make([]string, len(traced)-1)
	for i, c := range traced[1:] {
		others[i] = c.span.Parent()
	}
	made := &tracedCall{}
	for i, c := range traced {
		links := others
		if i > 0 {
			links = []string{made.traces[0].Parent}
		}
		span := c.span.Redis("reserve.lua", links...)
		span.Number("stampede.purchases", int64(len(batch)))
		span.Number("stampede.partition", int64(t.partition))
		made.spans = append(made.spans, span)
		made.traces = append(made.traces, order.Trace{Order: c.orderID, Parent: span.Parent()})
	}
	return made
}

func (t *tracedCall) end(err error) {
	for _, span := range t.spans {
		span.Fail(err)
		span.End()
	}
}
