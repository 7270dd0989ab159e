package ledger

import (
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

	"stampede/fulfillment/stream"
	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	// outcomesKept bounds the stream of outcomes, in messages; Redis frees whole nodes, so there may be some small ones
	// more. Whoever reads it may fall behind by as much, a second of a busy sale, whose messages are large; what was freed
	// unread is found by the looks. A message of 500 orders has 11 KB and one of outcomesTogether 22 KB, so all of them
	// have less than 1 MB: the stream stays when the sale is over.
	outcomesKept = 32
	// outcomesQueued bounds how many transactions wait to be told of.
	outcomesQueued = 256
	// OutcomesTogether is how many outcomes one message tells at most, but for those of one transaction.
	OutcomesTogether = 1000
)

// OutcomesConfig is what Outcomes work with. Client, which they do not close, and Keys are required.
type OutcomesConfig struct {
	Client redis.UniversalClient
	Keys   reservation.Keys
	Logger *slog.Logger
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Outcomes tell all ingresses what became of orders, a message for each transaction that was committed: buyers
// wait there, who else would have to be looked up again and again. It is done as well as it can be done at once and
// without keeping anybody waiting; what is not told is found by those looks. Outcomes are safe for concurrent use.
type Outcomes struct {
	publisher          *redisstream.Publisher
	topic              string
	queue              chan []order.OrderOutcome
	published, dropped prometheus.Counter
	publishing         retry.Outage
}

// NewOutcomes makes Outcomes, which tell nothing until they Run.
func NewOutcomes(c OutcomesConfig) (*Outcomes, error) {
	if c.Client == nil || c.Keys.Prefix == "" {
		return nil, errors.New("outcomes: Client and Keys are required")
	}
	stream.OrElse(&c.Logger, slog.Default())
	published, err1 := telemetry.RegisterOnce(c.Registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcomes_published_total", Help: "Changes of orders that the ingresses were told of.",
	}))
	dropped, err2 := telemetry.RegisterOnce(c.Registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "stampede_outcomes_dropped_total", Help: "Changes of orders that the ingresses were not told of, because Redis did not take them in time.",
	}))
	// It is never closed, because that would close the client.
	publisher, err3 := redisstream.NewPublisher(redisstream.PublisherConfig{Client: c.Client, DefaultMaxlen: outcomesKept}, nil)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("outcomes: %w", err)
	}
	return &Outcomes{
		publisher: publisher, topic: c.Keys.Outcomes(), queue: make(chan []order.OrderOutcome, outcomesQueued),
		published: published, dropped: dropped,
		publishing: retry.Outage{Log: c.Logger, Doing: "tell ingresses what became of orders"},
	}, nil
}

// Run publishes until ctx ends, and then what is waiting, as far as Redis takes it in the time of one call. It is
// for calling once.
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

// Publish tells of a transaction, and of those that wait behind it, in one message.
func (o *Outcomes) Publish(ctx context.Context, outcomes []order.OrderOutcome) {
	for more := true; more && len(outcomes) < OutcomesTogether; {
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

// tell has these outcomes published soon, if there is room in the queue. It never waits. Without Outcomes it
// does nothing.
func (o *Outcomes) tell(outcomes []order.OrderOutcome) {
	if o == nil || len(outcomes) == 0 {
		return
	}
	select {
	case o.queue <- outcomes:
	default:
		o.dropped.Add(float64(len(outcomes)))
	}
}

// tellRecorded tells what was recorded. An order that had been before is told of again: whoever recorded it may have
// died before that.
func (l *Ledger) tellRecorded(outcomes []Outcome, before map[uuid.UUID]order.Order) {
	if l.outcomes == nil {
		return
	}
	const firstEnd = 2 // the version of an order whose reservation and end were recorded together
	told := make([]order.OrderOutcome, 0, len(outcomes))
	for _, out := range outcomes {
		if out.Err != nil {
			continue
		}
		version := firstEnd
		if order, known := before[out.Event.OrderID]; known {
			version = order.Version
		}
		told = append(told, order.OrderOutcome{OrderID: out.Event.OrderID, Status: out.Status, Version: version})
	}
	l.outcomes.tell(told)
}

// tellChanged tells that the orders, which are as they were read, have all become what next is.
func (l *Ledger) tellChanged(orders []order.Order, next order.Order) {
	if l.outcomes == nil {
		return
	}
	told := make([]order.OrderOutcome, len(orders))
	for i, o := range orders {
		told[i] = order.OrderOutcome{OrderID: o.ID, Status: next.Status, Version: o.Version + 1}
	}
	l.outcomes.tell(told)
}

// Telling returns a Ledger that does the same and has these Outcomes told of what it has committed.
func (l *Ledger) Telling(o *Outcomes) *Ledger {
	telling := *l
	telling.outcomes = o
	return &telling
}
