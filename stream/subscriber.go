// Package stream reads the events of sales from Redis Streams and acknowledges them.
//
// It stands between lua/reserve.lua, which appends the entries, and the batcher, which handles
// their messages:
//
//   - Subscriber (subscriber.go) reads entries in pages (subscriber_read.go), every 10 ms where
//     many come (pace.go), keeps those in flight in a table (entry.go), claims the
//     entries of consumers that have gone silent (subscriber_read.go), and acknowledges handled entries or
//     stores them as dead letters (subscriber_settle.go).
//   - OrderErrors and the notes are what a handler and the subscriber exchange about a message.
//   - entry.go is the wire format: Watermill's, as watermill-redisstream writes it.
//   - Trimmer (backlog.go) removes entries that all consumers have acknowledged; BacklogCollector
//     there measures the rest.
//
// An entry is delivered at least once. It stays pending until its message is settled: acked, or
// nacked.
package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/telemetry"
)

var (
	// ErrSubscriberClosed is returned by Subscribe after Close.
	ErrSubscriberClosed = errors.New("subscriber is closed")
	// ErrAlreadySubscribed is returned by Subscribe for a stream that this Subscriber already reads: a
	// second subscription would share the consumer's pending list, and deliver entries that the
	// first one is still processing.
	ErrAlreadySubscribed = errors.New("stream is already subscribed")
)

// DeadLetterFunc stores durably an entry that no handler can apply: the entry is acknowledged as
// soon as the function returns nil. After an error it stays pending and is retried. It may be
// called more than once for the same entry.
type DeadLetterFunc func(ctx context.Context, entry Entry, reason error) error

// Config configures a Subscriber. Client, Control, Group, Consumer and DeadLetter have no default.
type Config struct {
	// Client makes the blocking reads, one at a time for each stream. Its read time-out must be
	// above BlockTimeout.
	Client redis.UniversalClient
	// Control makes all other calls. It is a separate client, so that an ack never waits for a
	// connection on which a read blocks.
	Control redis.UniversalClient
	// Group is the consumer group. A missing group is created at the start of the stream.
	Group string
	// Consumer names this process in the group. It must be the same after a restart, which then
	// finds its own pending entries immediately. No other process may use it at the same time.
	Consumer string

	// PageMax bounds the entries of one read. An entry holds all orders of one call of the reserve
	// script, so a page may hold many more orders.
	PageMax int
	// InFlightMax bounds the orders of a stream that are held here: read, and not yet acknowledged
	// in Redis. At the bound, reading pauses; the last page read may exceed it. With 1, messages are
	// handled in the order of the stream. Entries that wait to become dead letters do not count, up
	// to parkedMax of them, so that they do not block the others.
	InFlightMax int
	// BlockTimeout is how long a read waits for entries. Close takes about as long.
	BlockTimeout time.Duration
	// ClaimInterval is how often entries of silent consumers are looked for, plus or minus a half,
	// so that workers do not look at the same time.
	ClaimInterval time.Duration
	// MinIdle is how long a consumer may be silent about an entry before another one may claim it:
	// the lease on an entry. A live subscriber renews it every quarter of that time.
	MinIdle time.Duration
	// ConsumerIdleMax is how long a consumer without entries may be silent before it is deleted.
	ConsumerIdleMax time.Duration
	// MaxDeliveries is how many deliveries an entry gets before a refusal makes it a dead letter.
	MaxDeliveries int64
	// RedeliveryDelay is how long a refused message waits for its next delivery; the wait doubles
	// with every refusal, up to RedeliveryDelayMax.
	RedeliveryDelay    time.Duration
	RedeliveryDelayMax time.Duration
	// DrainTimeout is how long Close waits for messages to be settled and for their acks.
	DrainTimeout time.Duration

	DeadLetter DeadLetterFunc
	Logger     *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

func (c *Config) setDefaults() {
	c.PageMax = cmp.Or(c.PageMax, 64)
	c.InFlightMax = cmp.Or(c.InFlightMax, 2000)
	c.BlockTimeout = cmp.Or(c.BlockTimeout, 250*time.Millisecond)
	c.MinIdle = cmp.Or(c.MinIdle, 10*time.Second)
	c.ClaimInterval = cmp.Or(c.ClaimInterval, c.MinIdle/3)
	c.ConsumerIdleMax = cmp.Or(c.ConsumerIdleMax, 10*time.Minute)
	c.MaxDeliveries = cmp.Or(c.MaxDeliveries, 5)
	c.RedeliveryDelay = cmp.Or(c.RedeliveryDelay, 100*time.Millisecond)
	c.RedeliveryDelayMax = cmp.Or(c.RedeliveryDelayMax, max(5*time.Second, c.RedeliveryDelay))
	c.DrainTimeout = cmp.Or(c.DrainTimeout, 10*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
}

// Validate returns an error that names every violation. It expects the defaults to be set.
func (c *Config) Validate() error {
	var wrong []error
	must := func(holds bool, what string) {
		if !holds {
			wrong = append(wrong, errors.New(what))
		}
	}
	must(c.Client != nil, "Client is missing")
	must(c.Control != nil, "Control is missing")
	must(c.Group != "", "Group is missing")
	must(c.Consumer != "", "Consumer is missing")
	must(c.DeadLetter != nil, "DeadLetter is missing")
	must(c.PageMax > 0, "PageMax must be at least 1")
	must(c.InFlightMax > 0, "InFlightMax must be at least 1")
	must(c.BlockTimeout >= time.Millisecond, "BlockTimeout must be at least 1ms: for Redis, 0 means no limit")
	must(c.MinIdle >= 4*time.Millisecond, "MinIdle must be at least 4ms")
	must(c.ClaimInterval > 0, "ClaimInterval must be positive")
	must(c.ConsumerIdleMax > 0, "ConsumerIdleMax must be positive")
	must(c.MaxDeliveries > 0, "MaxDeliveries must be at least 1")
	must(c.RedeliveryDelay > 0 && c.RedeliveryDelay <= c.RedeliveryDelayMax,
		"RedeliveryDelay must be positive and at most RedeliveryDelayMax")
	must(c.DrainTimeout > 0, "DrainTimeout must be positive")
	var timeout time.Duration
	switch client := c.Client.(type) {
	case *redis.Client:
		timeout = client.Options().ReadTimeout
	case *redis.ClusterClient:
		timeout = client.Options().ReadTimeout
	}
	must(timeout <= 0 || timeout > c.BlockTimeout, "BlockTimeout must be below the read time-out of Client")
	if len(wrong) > 0 {
		return fmt.Errorf("subscriber config: %w", errors.Join(wrong...))
	}
	return nil
}

// Subscriber is a watermill message.Subscriber on Redis Streams that reads and acknowledges in
// batches and loses nothing. It reads what watermill-redisstream's publisher writes, and that
// package's subscriber can replace it on the same stream and group.
//
// Where orders come often, entries are read every 10 ms, a page at a time. Messages of a stream are
// delivered in the order in which they were read, up to InFlightMax of them before the first is
// settled. An ack removes the entry from the group's pending list, in one XACK with all others that
// arrived during the last XACK. A nack causes another delivery after a wait that doubles.
//
// The number of deliveries alone never makes a dead letter. Redis counts every delivery,
// so worker restarts raise the number for healthy entries. An entry is at fault when its
// handler refused it, in this process, after MaxDeliveries; so a handler whose database is away
// must wait rather than nack. A nack while the subscription is being closed is not counted against
// the entry.
//
// A message's context is cancelled when it is settled, or when DrainTimeout is over; not before, so
// that work in flight can finish. A message that is not settled by then stays pending.
type Subscriber struct {
	config  Config
	metrics *subscriberMetrics
	closing chan struct{}

	mu      sync.Mutex
	closed  bool
	streams map[string]struct{} // that are being read
	running sync.WaitGroup
}

var (
	_ message.Subscriber           = (*Subscriber)(nil)
	_ message.SubscribeInitializer = (*Subscriber)(nil)
)

// NewSubscriber returns a Subscriber. It does not connect to Redis yet, and it never closes the
// clients.
func NewSubscriber(config Config) (*Subscriber, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	metrics, err := newSubscriberMetrics(config.Registerer)
	if err != nil {
		return nil, err
	}
	return &Subscriber{
		config: config, metrics: metrics,
		closing: make(chan struct{}), streams: make(map[string]struct{}),
	}, nil
}

// CreateMetrics creates the metrics of the streams before their first events.
func (s *Subscriber) CreateMetrics(streams []string) {
	for _, stream := range streams {
		s.metrics.of(stream)
	}
}

// SubscribeInitialize creates the stream and the group.
func (s *Subscriber) SubscribeInitialize(stream string) error {
	return CreateGroup(context.Background(), s.config.Control, stream, s.config.Group)
}

// Subscribe delivers the messages of a stream until ctx is cancelled or the Subscriber is closed;
// both drain as Close describes. It returns while Redis is away, too: reading begins when Redis is
// back.
func (s *Subscriber) Subscribe(ctx context.Context, stream string) (<-chan *message.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("subscribe %s: %w", stream, ErrSubscriberClosed)
	}
	if _, taken := s.streams[stream]; taken {
		return nil, fmt.Errorf("subscribe %s: %w", stream, ErrAlreadySubscribed)
	}
	s.streams[stream] = struct{}{}

	sub := newSubscription(ctx, &s.config, s.metrics, stream)
	s.running.Go(func() {
		sub.run(ctx.Done(), s.closing)
		s.mu.Lock()
		delete(s.streams, stream)
		s.mu.Unlock()
		close(sub.output)
	})
	return sub.output, nil
}

// Close stops reading, waits up to DrainTimeout until delivered messages are settled and their acks
// are in Redis, and closes the channels. It may be called more than once and concurrently; every
// call returns when the drain is done. The clients stay open.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

// CreateGroup creates the group if it is missing. It starts at 0, never at $: entries from before
// the group must be delivered as well.
func CreateGroup(ctx context.Context, rdb redis.UniversalClient, stream, group string) error {
	err := rdb.XGroupCreateMkStream(ctx, stream, group, "0").Err()
	if err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
		return fmt.Errorf("create group %s of %s: %w", group, stream, err)
	}
	return nil
}

// isNoGroup reports whether the stream or the group is missing: deleted, or lost with a FLUSHALL.
func isNoGroup(err error) bool { return err != nil && strings.Contains(err.Error(), "NOGROUP") }

// notes carry what the subscriber and the handler of a message exchange: a message of watermill has no
// place for it. They belong to the handler until it acks or nacks, and to the subscriber afterwards.
type notes struct {
	// page counts the messages of the page that have not arrived; nil for a message delivered alone.
	page *atomic.Int64
	// refusal is why the handler refuses the message, for the dead letter.
	refusal error
	// acked is called when Redis has the ack, or when it was given up; it may be nil.
	acked func(sent bool)
}

type notesKey struct{}

func withNotes(ctx context.Context, n *notes) context.Context {
	return context.WithValue(ctx, notesKey{}, n)
}

// NoteArrival records that the message with this context has reached its handler. It reports whether
// messages that were read together with it are still to come, as long as the subscriber is not
// closed. Call it once for a delivery.
func NoteArrival(ctx context.Context) (moreFollow bool) {
	n, ok := ctx.Value(notesKey{}).(*notes)
	return ok && n.page != nil && n.page.Add(-1) > 0
}

// NoteRefusal records why the handler of a message with this context refuses it. It does nothing
// for another subscriber's message.
func NoteRefusal(ctx context.Context, err error) {
	if n, ok := ctx.Value(notesKey{}).(*notes); ok {
		n.refusal = err
	}
}

// NoteAcked has f called when the ack of the message with this context is sent, or given up because the subscriber
// stops. It does nothing for another subscriber's message.
func NoteAcked(ctx context.Context, f func(sent bool)) {
	if n, ok := ctx.Value(notesKey{}).(*notes); ok {
		n.acked = f
	}
}

var (
	// ErrStopping is returned for a message that was not recorded before the worker had to stop. It
	// is no fault of the message, which stays pending and is delivered again. It wraps
	// context.Canceled, which the Router does not log as a failure.
	ErrStopping = fmt.Errorf("worker is stopping: %w", context.Canceled)

	// ErrDeferred is returned for messages of blocked sales when too many of them wait. They stay
	// pending, and are claimed after a while. It is no fault of the messages, and the Router
	// does not log it as a failure.
	ErrDeferred = fmt.Errorf("too many messages of blocked sales are waiting: %w", context.Canceled)
)

// OrderErrors is returned by a handler that cannot apply these orders of a message, and has applied
// all others. Each becomes a dead letter of its own.
type OrderErrors []OrderError

// OrderError says why an order of a message cannot be applied.
type OrderError struct {
	OrderID uuid.UUID
	Err     error
}

// Error names the first few orders.
func (e OrderErrors) Error() string {
	const named = 3
	texts := make([]string, 0, named+1)
	for _, o := range e[:min(len(e), named)] {
		texts = append(texts, fmt.Sprintf("order %s: %v", o.OrderID, o.Err))
	}
	if more := len(e) - named; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns the errors of all orders.
func (e OrderErrors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, o := range e {
		errs[i] = o.Err
	}
	return errs
}

// subscriberMetrics are shared by all subscribers with the same Registerer.
type subscriberMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost *prometheus.CounterVec

	inFlight *prometheus.GaugeVec
}

// streamMetrics are the metrics of one stream.
type streamMetrics struct {
	acked, redelivered, claimed, taken, deadLettered, lost prometheus.Counter

	inFlight prometheus.Gauge
}

func newSubscriberMetrics(reg prometheus.Registerer) (*subscriberMetrics, error) {
	var failed []error
	counter := func(name, help string) *prometheus.CounterVec {
		c, err := telemetry.RegisterOnce(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help},
			[]string{"stream"}))
		failed = append(failed, err)
		return c
	}
	m := &subscriberMetrics{
		acked: counter("stampede_entries_acked_total", "Stream entries acknowledged in Redis."),
		redelivered: counter("stampede_entries_redelivered_total",
			"Messages delivered again after their handler had refused them."),
		claimed: counter("stampede_entries_claimed_total",
			"Stream entries claimed from silent consumers."),
		taken: counter("stampede_entries_taken_total",
			"Stream entries that another consumer took over while they were held here."),
		deadLettered: counter("stampede_entries_dead_lettered_total", "Stream entries stored as dead letters."),
		lost: counter("stampede_entries_lost_total",
			"Stream entries that were trimmed or deleted before they were handled."),
	}
	gauge, err := telemetry.RegisterOnce(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "stampede_entries_in_flight",
		Help: "Stream entries held by this process: read, and not yet acknowledged in Redis.",
	}, []string{"stream"}))
	m.inFlight = gauge
	if err := errors.Join(append(failed, err)...); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

func (m *subscriberMetrics) of(stream string) *streamMetrics {
	return &streamMetrics{
		acked:        m.acked.WithLabelValues(stream),
		redelivered:  m.redelivered.WithLabelValues(stream),
		claimed:      m.claimed.WithLabelValues(stream),
		taken:        m.taken.WithLabelValues(stream),
		deadLettered: m.deadLettered.WithLabelValues(stream),
		lost:         m.lost.WithLabelValues(stream),
		inFlight:     m.inFlight.WithLabelValues(stream),
	}
}
