package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

var (
	// ErrSubscriberClosed is returned by Subscribe after Close.
	ErrSubscriberClosed = errors.New("subscriber is closed")
	// ErrAlreadySubscribed is returned by Subscribe for a stream that this Subscriber already reads: a
	// second subscription would share the consumer's pending list and be given what the first one works on.
	ErrAlreadySubscribed = errors.New("stream is already subscribed")
)

// DeadLetterFunc stores an entry that no handler can apply, so that it is there for an operator
// whatever happens next: the entry is acknowledged as soon as the function returns nil. After an
// error it stays pending and is tried again. It may be called more than once for the same entry.
type DeadLetterFunc func(ctx context.Context, entry Entry, reason error) error

// Config configures a Subscriber. Client, Control, Group, Consumer and DeadLetter have no default.
type Config struct {
	// Client makes the blocking reads, one at a time for each stream. Its read time-out must be
	// above BlockTimeout.
	Client redis.UniversalClient
	// Control makes all other calls. It is a client of its own, so that an ack never waits for a
	// connection on which a read blocks.
	Control redis.UniversalClient
	// Group is the consumer group. It is created where it is missing, at the start of the stream.
	Group string
	// Consumer names this process in the group. It must be the same after a restart, which then
	// finds its own pending entries at once, and no other process may have it at the same time.
	Consumer string

	// BatchMax is how many entries one read asks for at most.
	BatchMax int
	// InFlightMax is how many entries of a stream are held here at most: read, and not yet
	// acknowledged in Redis. While there are so many, nothing is read. With 1, messages are handled
	// in the order of the stream. Entries that wait to become dead letters do not count, up to
	// parkedMax of them, so that they do not stop the others.
	InFlightMax int
	// BlockTimeout is how long a read waits for entries. Close takes about as long.
	BlockTimeout time.Duration
	// ClaimInterval is how often entries of silent consumers are looked for, give or take a half, so
	// that workers do not all look at once.
	ClaimInterval time.Duration
	// MinIdle is how long a consumer may be silent about an entry until another one may claim it:
	// the lease on an entry. A live subscriber renews it every quarter of that time.
	MinIdle time.Duration
	// ConsumerIdleMax is how long a consumer without entries may be silent until it is deleted.
	ConsumerIdleMax time.Duration
	// MaxDeliveries is how many deliveries an entry gets before a refusal makes it a dead letter.
	MaxDeliveries int64
	// RedeliveryDelay is how long a refused message waits for its next delivery; the wait doubles
	// with every refusal, up to RedeliveryDelayMax.
	RedeliveryDelay    time.Duration
	RedeliveryDelayMax time.Duration
	// DrainTimeout is how long Close waits for messages to be settled, and for their acks to arrive.
	DrainTimeout time.Duration

	DeadLetter DeadLetterFunc
	Logger     *slog.Logger
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
}

func (c *Config) setDefaults() {
	OrElse(&c.BatchMax, 500)
	OrElse(&c.InFlightMax, 4*c.BatchMax)
	OrElse(&c.BlockTimeout, 250*time.Millisecond)
	OrElse(&c.MinIdle, 10*time.Second)
	OrElse(&c.ClaimInterval, c.MinIdle/3)
	OrElse(&c.ConsumerIdleMax, 10*time.Minute)
	OrElse(&c.MaxDeliveries, 5)
	OrElse(&c.RedeliveryDelay, 100*time.Millisecond)
	OrElse(&c.RedeliveryDelayMax, max(5*time.Second, c.RedeliveryDelay))
	OrElse(&c.DrainTimeout, 10*time.Second)
	OrElse(&c.Logger, slog.Default())
}

func OrElse[T comparable](value *T, standard T) {
	var zero T
	if *value == zero {
		*value = standard
	}
}

// Validate returns an error that names everything that does not hold, after the defaults were set.
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
	must(c.BatchMax > 0, "BatchMax must be at least 1")
	must(c.InFlightMax > 0, "InFlightMax must be at least 1")
	must(c.BlockTimeout >= time.Millisecond, "BlockTimeout must be at least 1ms: Redis takes 0 for ever")
	must(c.MinIdle >= 4*time.Millisecond, "MinIdle must be at least 4ms")
	must(c.ClaimInterval > 0, "ClaimInterval must be positive")
	must(c.ConsumerIdleMax > 0, "ConsumerIdleMax must be positive")
	must(c.MaxDeliveries > 0, "MaxDeliveries must be at least 1")
	must(c.RedeliveryDelay > 0 && c.RedeliveryDelay <= c.RedeliveryDelayMax,
		"RedeliveryDelay must be positive and at most RedeliveryDelayMax")
	must(c.DrainTimeout > 0, "DrainTimeout must be positive")
	if client, ok := c.Client.(*redis.Client); ok {
		timeout := client.Options().ReadTimeout
		must(timeout <= 0 || timeout > c.BlockTimeout, "BlockTimeout must be below the read time-out of Client")
	}
	if len(wrong) > 0 {
		return fmt.Errorf("subscriber config: %w", errors.Join(wrong...))
	}
	return nil
}

// Subscriber is a watermill message.Subscriber on Redis Streams that reads and acknowledges in
// batches and loses nothing. It reads what watermill-redisstream's publisher writes, and that
// package's subscriber can take its place on the same stream and group.
//
// Messages of a stream are handed out in the order in which they were read, without waiting for one
// to be settled before the next, up to InFlightMax. An ack makes the entry leave the group's pending
// list, in one XACK with all others that came in while the last XACK was under way. A nack makes it
// be delivered again after a wait that doubles.
//
// The number of deliveries alone never makes a dead letter. Redis counts every time an entry changes
// hands, so worker restarts raise it for entries with which nothing is wrong. What shows that an
// entry is at fault is that its handler refused it, in this process, when it had had MaxDeliveries;
// and a handler whose database is away must wait for it rather than nack. A nack while the
// subscription is being closed is taken for the closing, not for the entry.
//
// A message's context is cancelled when it is settled, or when Close has waited in vain; not before,
// so that work under way can be finished. A message that is not settled by then stays pending.
type Subscriber struct {
	config  Config
	Metrics *subscriberMetrics
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

// NewSubscriber returns a Subscriber. It does not talk to Redis yet, and it never closes the clients.
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
		config: config, Metrics: metrics,
		closing: make(chan struct{}), streams: make(map[string]struct{}),
	}, nil
}

// SubscribeInitialize creates the stream and the group.
func (s *Subscriber) SubscribeInitialize(stream string) error {
	return CreateGroup(context.Background(), s.config.Control, stream, s.config.Group)
}

// Subscribe hands out the messages of a stream until ctx is cancelled or the Subscriber is closed;
// both end it in the same way, as Close describes. It returns while Redis is away, too: reading
// begins when Redis is there.
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

	sub := newSubscription(ctx, &s.config, s.Metrics, stream)
	s.running.Go(func() {
		sub.run(ctx.Done(), s.closing)
		s.mu.Lock()
		delete(s.streams, stream)
		s.mu.Unlock()
		close(sub.output)
	})
	return sub.output, nil
}

// Close stops reading, waits up to DrainTimeout until the messages that are out have been settled
// and their acks have arrived in Redis, and closes the channels. It may be called more than once
// and at the same time; every call returns when all is done. The clients stay open.
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

// CreateGroup makes sure that the group is there. It starts at 0, never at $: what was appended
// before the group existed must be delivered as well.
func CreateGroup(ctx context.Context, rdb redis.UniversalClient, stream, group string) error {
	err := rdb.XGroupCreateMkStream(ctx, stream, group, "0").Err()
	if err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
		return fmt.Errorf("create group %s of %s: %w", group, stream, err)
	}
	return nil
}

// isNoGroup tells whether the stream or the group is missing: deleted, or gone with a FLUSHALL.
func isNoGroup(err error) bool { return err != nil && strings.Contains(err.Error(), "NOGROUP") }
