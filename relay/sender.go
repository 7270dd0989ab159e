package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"stampede/internal/connect"
	"stampede/internal/tracing"
	"stampede/relay/broker"
	"stampede/relay/feed"
	"stampede/relay/target"
	"stampede/relay/webhook"
)

// sender sends events to one target. It is safe for concurrent use.
type sender interface {
	// Send returns nil when the receiver has the event.
	Send(ctx context.Context, e *feed.Event) error
	// InFlight is how many calls of Send are useful at the same time.
	InFlight() int
	Close() error
}

// open returns the sender of a target. It makes no connection.
func (r *Relay) open(t *target.Target, to *target.Address) (sender, error) {
	switch to.Kind {
	case target.Webhook:
		return webhook.New(webhook.Config{
			URL: to.URL, Secrets: t.Secrets, AllowPrivate: t.AllowPrivate, TLS: r.config.TLS, Agent: r.config.Agent,
		}), nil
	case target.RedisStream:
		client, err := connect.Control(to.URL)
		if err != nil {
			return nil, err
		}
		return broker.NewStream(client, to.Stream, to.MaxLen)
	case target.Kafka:
		return broker.NewTopic(to.Brokers, to.Topic, r.config.Agent)
	case target.Stdout:
		return r.stdout, nil
	}
	return nil, fmt.Errorf("a target of the kind %s", to.Kind)
}

// tracedSender makes a span for each try to deliver an event that is traced. The receiver continues below it.
type tracedSender struct {
	sender
	tracer *tracing.Tracer
	to     *target.Address
	name   string
}

func (s *tracedSender) Send(ctx context.Context, e *feed.Event) error {
	span := s.tracer.Continue(tracing.Producer, "deliver event", e.TraceParent)
	if !span.On() {
		return s.sender.Send(ctx, e)
	}
	defer span.End()
	span.Text("messaging.system", string(s.to.Kind))
	span.Text("messaging.operation.name", "deliver")
	span.Text("messaging.operation.type", "send")
	span.Text("messaging.destination.name", s.name)
	span.Text("stampede.event_id", e.ID)
	span.Text("stampede.order_id", e.Subject)
	span.Number("stampede.position", e.Position)
	sent := *e
	sent.TraceParent = span.Parent()
	err := s.sender.Send(span.In(ctx), &sent)
	span.Fail(err)
	return err
}

const (
	backoffFirst = time.Second
	backoffMax   = 24 * time.Hour
	backoffMin   = 50 * time.Millisecond
)

// backoff is the pause after so many failures in a row: random, up to a limit that doubles from a second to a day (full
// jitter, https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). A receiver that asks for a longer
// pause gets it.
func backoff(failures int, err error) time.Duration {
	limit := backoffMax
	if shift := failures - 1; shift < 20 && backoffFirst<<shift < backoffMax {
		limit = backoffFirst << shift
	}
	pause := max(backoffMin, rand.N(limit))
	if refusal, ok := errors.AsType[*webhook.Refusal](err); ok {
		pause = max(pause, refusal.RetryAfter)
	}
	return pause
}

// isFinal reports whether the receiver wants no more events.
func isFinal(err error) bool {
	refusal, ok := errors.AsType[*webhook.Refusal](err)
	return ok && refusal.Final()
}
