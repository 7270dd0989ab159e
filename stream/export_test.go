package stream

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	CountedFor   = countedFor
	FewEntries   = fewEntries
	ReadInterval = readInterval
)

const (
	LeaseKept  = leaseKept
	LeaseGone  = leaseGone
	LeaseTaken = leaseTaken
)

type ReadOnce = readOnce

func (c *BacklogCollector) Read(ctx context.Context, stream string) (Backlog, error) {
	return c.read(ctx, stream)
}

func (s *Subscriber) Config() Config { return s.config }

// Metrics of a stream.
type Metrics struct {
	Redelivered, Claimed, Taken, Lost prometheus.Counter

	InFlight prometheus.Gauge
}

func (s *Subscriber) Metrics(stream string) Metrics {
	m := s.metrics.of(stream)
	return Metrics{
		Redelivered: m.redelivered, Claimed: m.claimed, Taken: m.taken, Lost: m.lost, InFlight: m.inFlight,
	}
}

// SendLastAck sends the ack of an entry that arrives together with the end of the subscription.
func (s *Subscriber) SendLastAck(ctx context.Context, stream, id string) {
	sub := newSubscription(ctx, &s.config, s.metrics, stream)
	defer sub.expire()
	sub.acks.add(id, nil)
	<-sub.acks.wake
	settled := make(chan struct{})
	close(settled)
	sub.acknowledge(settled)
}

func (t *Trimmer) Trimmed() prometheus.Counter { return t.trimmed }
