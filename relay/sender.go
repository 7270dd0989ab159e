package relay

import (
	"context"
	"fmt"

	"stampede/internal/connect"
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
func (r *Relay) open(t *target.Target) (sender, error) {
	to, err := target.ParseAddress(t.URL)
	if err != nil {
		return nil, err
	}
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
