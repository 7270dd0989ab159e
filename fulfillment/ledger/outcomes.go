package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	// outcomesKept bounds the stream of outcomes, in messages; Redis trims whole nodes, so it may hold a
	// few more. A reader may fall behind by this much, about a second of a busy sale; lookups find
	// outcomes that were trimmed unread. A message of 500 orders has 11 KB and one of OutcomesPerMessage 22
	// KB, so the stream stays below 1 MB.
	outcomesKept = 32
	// outcomesQueued bounds the transactions whose outcomes wait to be published.
	outcomesQueued = 256
	// OutcomesPerMessage bounds the outcomes of one message, unless one transaction alone has more.
	OutcomesPerMessage = 1000
)

// OutcomesConfig configures Outcomes. Client, which Outcomes does not close, and Keys are required.
type OutcomesConfig struct {
	Client redis.UniversalClient
	Keys   reservation.Keys
	Logger *slog.Logger
	// Registerer registers the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Outcomes publishes the outcome of orders to all ingresses, one message for each committed transaction,
// so that requests that wait need not poll. It is best effort and never blocks; lookups find outcomes
// that were not published. It is safe for concurrent use.
type Outcomes struct {
	publisher          *redisstream.Publisher
	topic              string
	queue              chan []order.OrderOutcome
	published, dropped prometheus.Counter
	publishing         retry.Outage
}

// NewOutcomes returns Outcomes, which publishes nothing until Run.
func NewOutcomes(c OutcomesConfig) (*Outcomes, error) {
	if c.Client == nil || c.Keys.Prefix == "" {
		return nil, errors.New("outcomes: Client and Keys are required")
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	published, err1 := telemetry.RegisterOnce(c.Registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcomes_published_total", Help: "Changes of orders that were published to the ingresses.",
	}))
	dropped, err2 := telemetry.RegisterOnce(c.Registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcomes_dropped_total",
		Help: "Changes of orders that were not published to the ingresses, because Redis did not accept them in time.",
	}))
	// The publisher is never closed, because that would close the client.
	publisher, err3 := redisstream.NewPublisher(
		redisstream.PublisherConfig{Client: c.Client, DefaultMaxlen: outcomesKept}, nil,
	)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("outcomes: %w", err)
	}
	return &Outcomes{
		publisher: publisher, topic: c.Keys.Outcomes(), queue: make(chan []order.OrderOutcome, outcomesQueued),
		published: published, dropped: dropped,
		publishing: retry.Outage{Log: c.Logger, Doing: "publish outcomes to the ingresses"},
	}, nil
}

// Run publishes until ctx ends, and then drains the queue within the time-out of one call to Redis. Call
// it once.
func (o *Outcomes) Run(ctx context.Context) {
	for {
		select {
		case first := <-o.queue:
			limited, cancel := retry.ForCall(ctx)
			o.Publish(limited, first)
			cancel()
		case <-ctx.Done():
			o.publishRest(ctx)
			return
		}
	}
}

func (o *Outcomes) publishRest(ctx context.Context) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	for {
		select {
		case first := <-o.queue:
			o.Publish(limited, first)
		default:
			return
		}
	}
}

// Publish publishes these outcomes, together with those that wait in the queue, in one message.
func (o *Outcomes) Publish(ctx context.Context, outcomes []order.OrderOutcome) {
	for more := true; more && len(outcomes) < OutcomesPerMessage; {
		select {
		case next := <-o.queue:
			outcomes = append(outcomes, next...)
		default:
			more = false
		}
	}
	msg := message.NewMessage(watermill.NewUUID(), order.AppendOutcomes(nil, outcomes))
	msg.SetContext(ctx)
	if err := o.publisher.Publish(o.topic, msg); err != nil {
		o.publishing.Failed(err)
		o.dropped.Add(float64(len(outcomes)))
		return
	}
	o.publishing.Over()
	o.published.Add(float64(len(outcomes)))
}

// enqueue queues the outcomes to be published, if the queue has room. It never blocks, and does nothing
// if o is nil.
func (o *Outcomes) enqueue(outcomes []order.OrderOutcome) {
	if o == nil || len(outcomes) == 0 {
		return
	}
	select {
	case o.queue <- outcomes:
	default:
		o.dropped.Add(float64(len(outcomes)))
	}
}

// publishRecorded publishes the outcomes, including those of orders that were recorded earlier: the
// worker that recorded them may have crashed before it published them.
func (l *Ledger) publishRecorded(outcomes []Outcome, earlier map[uuid.UUID]order.Order) {
	if l.outcomes == nil {
		return
	}
	const recordedVersion = 2 // of an order whose reservation and outcome were recorded together
	changed := make([]order.OrderOutcome, 0, len(outcomes))
	for _, out := range outcomes {
		if out.Err != nil {
			continue
		}
		version := recordedVersion
		if o, known := earlier[out.Event.OrderID]; known {
			version = o.Version
		}
		changed = append(changed, order.OrderOutcome{OrderID: out.Event.OrderID, Status: out.Status, Version: version})
	}
	l.outcomes.enqueue(changed)
}

// publishChanged publishes that the orders, given as they were read, have all changed to next.
func (l *Ledger) publishChanged(orders []order.Order, next order.Order) {
	if l.outcomes == nil {
		return
	}
	changed := make([]order.OrderOutcome, len(orders))
	for i, o := range orders {
		changed[i] = order.OrderOutcome{OrderID: o.ID, Status: next.Status, Version: o.Version + 1}
	}
	l.outcomes.enqueue(changed)
}

// WithOutcomes returns a Ledger that also publishes its outcomes to o.
func (l *Ledger) WithOutcomes(o *Outcomes) *Ledger {
	publishing := *l
	publishing.outcomes = o
	return &publishing
}
