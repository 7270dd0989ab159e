package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

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
	"stampede/stream"
)

const (
	// outcomesKept bounds the stream of outcomes, in messages; Redis trims whole nodes, so it may hold a
	// few more. A reader may fall behind by this much, about a second of a busy sale; lookups find
	// outcomes that were trimmed unread. A message of 500 orders has 11 KB and one of OutcomesPerMessage 22
	// KB, so the stream stays below 1 MB.
	outcomesKept = 32
	// outcomesQueued bounds the transactions of a partition whose outcomes wait to be published.
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
// that were not published. Each partition has a stream and a queue of its own, so that none waits for the Redis server
// of another. It is safe for concurrent use.
type Outcomes struct {
	keys               reservation.Keys
	publisher          *redisstream.Publisher
	partitions         []outcomesOfPartition
	published, dropped prometheus.Counter
}

type outcomesOfPartition struct {
	stream string
	queue  chan []order.OrderOutcome
	outage retry.Outage // of the goroutine that publishes
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
		redisstream.PublisherConfig{Client: stream.Announcer{UniversalClient: c.Client}, DefaultMaxlen: outcomesKept}, nil,
	)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("outcomes: %w", err)
	}
	partitions := make([]outcomesOfPartition, c.Keys.Partitions)
	for p := range partitions {
		partitions[p] = outcomesOfPartition{
			stream: c.Keys.Outcomes(p), queue: make(chan []order.OrderOutcome, outcomesQueued),
			outage: retry.Outage{Log: c.Logger.With("partition", p), Doing: "publish outcomes to the ingresses"},
		}
	}
	return &Outcomes{
		keys: c.Keys, publisher: publisher, partitions: partitions, published: published, dropped: dropped,
	}, nil
}

// Run publishes until ctx is done, and then drains the queues within the time-out of one call to Redis. Call
// it once.
func (o *Outcomes) Run(ctx context.Context) {
	var publishing sync.WaitGroup
	for partition := range o.partitions {
		publishing.Go(func() { o.runPartition(ctx, partition) })
	}
	publishing.Wait()
}

func (o *Outcomes) runPartition(ctx context.Context, partition int) {
	for {
		select {
		case first := <-o.partitions[partition].queue:
			limited, cancel := retry.ForCall(ctx)
			o.Publish(limited, partition, first)
			cancel()
		case <-ctx.Done():
			o.publishRest(ctx, partition)
			return
		}
	}
}

func (o *Outcomes) publishRest(ctx context.Context, partition int) {
	limited, cancel := retry.ForCall(ctx)
	defer cancel()
	for {
		select {
		case first := <-o.partitions[partition].queue:
			o.Publish(limited, partition, first)
		default:
			return
		}
	}
}

// Publish publishes these outcomes of a partition, together with those that wait in its queue, in one message. Only
// one call for a partition may run at a time.
func (o *Outcomes) Publish(ctx context.Context, partition int, outcomes []order.OrderOutcome) {
	p := &o.partitions[partition]
	for more := true; more && len(outcomes) < OutcomesPerMessage; {
		select {
		case next := <-p.queue:
			outcomes = append(outcomes, next...)
		default:
			more = false
		}
	}
	msg := message.NewMessage(watermill.NewUUID(), order.AppendOutcomes(nil, outcomes))
	msg.SetContext(ctx)
	if err := o.publisher.Publish(p.stream, msg); err != nil {
		p.outage.Failed(err)
		o.dropped.Add(float64(len(outcomes)))
		return
	}
	p.outage.Over()
	o.published.Add(float64(len(outcomes)))
}

// groups returns an empty group for each partition.
func (o *Outcomes) groups() [][]order.OrderOutcome {
	return make([][]order.OrderOutcome, len(o.partitions))
}

// enqueue queues the outcomes to be published, grouped by the partitions of their sales, if the queues have room. It
// never blocks.
func (o *Outcomes) enqueue(groups [][]order.OrderOutcome) {
	for partition, outcomes := range groups {
		if len(outcomes) == 0 {
			continue
		}
		select {
		case o.partitions[partition].queue <- outcomes:
		default:
			o.dropped.Add(float64(len(outcomes)))
		}
	}
}

// publishRecorded publishes the outcomes, including those of orders that were recorded earlier: the
// worker that recorded them may have crashed before it published them.
func (l *Ledger) publishRecorded(outcomes []Outcome, earlier map[uuid.UUID]order.Order) {
	if l.outcomes == nil {
		return
	}
	const recordedVersion = 2 // of an order whose reservation and outcome were recorded together
	groups := l.outcomes.groups()
	for _, out := range outcomes {
		if out.Err != nil {
			continue
		}
		version := recordedVersion
		if o, known := earlier[out.Event.OrderID]; known {
			version = o.Version
		}
		group := &groups[l.outcomes.keys.Partition(out.Event.SaleID)]
		*group = append(*group, order.OrderOutcome{OrderID: out.Event.OrderID, Status: out.Status, Version: version})
	}
	l.outcomes.enqueue(groups)
}

// publishChanged publishes that the orders, given as they were read, have all changed to next.
func (l *Ledger) publishChanged(orders []order.Order, next order.Order) {
	if l.outcomes == nil {
		return
	}
	groups := l.outcomes.groups()
	for _, o := range orders {
		group := &groups[l.outcomes.keys.Partition(o.SaleID)]
		*group = append(*group, order.OrderOutcome{OrderID: o.ID, Status: next.Status, Version: o.Version + 1})
	}
	l.outcomes.enqueue(groups)
}

// WithOutcomes returns a Ledger that also publishes its outcomes to o.
func (l *Ledger) WithOutcomes(o *Outcomes) *Ledger {
	publishing := *l
	publishing.outcomes = o
	return &publishing
}

// WithChanges returns a Ledger that also calls onStatus with the new status of each order that it pays or cancels,
// once.
func (l *Ledger) WithChanges(onStatus func(order.Status)) *Ledger {
	counting := *l
	counting.onStatus = onStatus
	return &counting
}
