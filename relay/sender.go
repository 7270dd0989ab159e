package relay

import (
	"context"
	"fmt"
	"sync"

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
		return broker.Redis(client, to.Stream, to.MaxLen)
	case target.Kafka:
		return &lazyKafka{brokers: to.Brokers, topic: to.Topic, client: r.config.Agent}, nil
	case target.Stdout:
		return r.stdout, nil
	}
	return nil, fmt.Errorf("a target of the kind %s", to.Kind)
}

// lazyKafka connects with its first event, so that brokers which do not answer are a failed delivery.
type lazyKafka struct {
	brokers       []string
	topic, client string

	mu sync.Mutex
	to *broker.Publisher
}

func (k *lazyKafka) InFlight() int { return broker.KafkaInFlight }

func (k *lazyKafka) Send(ctx context.Context, e *feed.Event) error {
	to, err := k.connected()
	if err != nil {
		return err
	}
	return to.Send(ctx, e)
}

func (k *lazyKafka) connected() (*broker.Publisher, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.to == nil {
		to, err := broker.Kafka(k.brokers, k.topic, k.client)
		if err != nil {
			return nil, err
		}
		k.to = to
	}
	return k.to, nil
}

func (k *lazyKafka) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.to == nil {
		return nil
	}
	return k.to.Close()
}
