package relay

import (
	"context"

	"stampede/internal/tracing"
	"stampede/relay/feed"
)

// tracedSender makes a span for each try to deliver an event that is traced. The receiver continues below it.
type tracedSender struct {
	sender
	tracer *tracing.Tracer
	target string
}

func (s *tracedSender) Send(ctx context.Context, e *feed.Event) error {
	span := s.tracer.Continue(tracing.Producer, "deliver event", e.TraceParent)
	if !span.On() {
		return s.sender.Send(ctx, e)
	}
	defer span.End()
	span.Text("stampede.target", s.target)
	span.Text("stampede.event_id", e.ID)
	span.Text("stampede.order_id", e.Subject)
	span.Number("stampede.position", e.Position)
	sent := *e
	sent.TraceParent = span.Parent()
	err := s.sender.Send(span.In(ctx), &sent)
	span.Fail(err)
	return err
}
