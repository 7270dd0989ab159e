package stream

import (
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	CountedFor   = countedFor
	FewEntries   = fewEntries
	ReadInterval = readInterval
	AckWait      = ackWait
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

// conformance builds pairs of the stock publisher and our subscriber.
type conformance struct {
	features tests.Features
	change   func(*Config)
}

func newConformance(t *testing.T, features tests.Features, change func(*Config)) conformance {
	mute(t)
	keys := testkit.Keys(t)
	features.ConsumerGroups = true
	features.Persistent = true
	features.GenerateTopicFunc = func(tctx tests.TestContext) string { return keys.Prefix + ":" + string(tctx.TestID) }
	return conformance{features, change}
}

// muted counts the tests that run the suite, and holds the standard output of the process meanwhile.
var muted struct {
	sync.Mutex
	tests  int
	stdout *os.File
}

// mute drops what the suite prints without a logger: it would mix with the logs of failing tests.
func mute(t *testing.T) {
	muted.Lock()
	defer muted.Unlock()
	if muted.tests++; muted.tests == 1 {
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		require.NoError(t, err)
		muted.stdout, os.Stdout = os.Stdout, null
		log.SetOutput(null)
	}
	t.Cleanup(func() {
		muted.Lock()
		defer muted.Unlock()
		if muted.tests--; muted.tests == 0 {
			_ = os.Stdout.Close()
			os.Stdout = muted.stdout
			log.SetOutput(os.Stderr)
		}
	})
}

func (c conformance) pair(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	blocking, err := connect.Blocking(testkit.RedisURL(t))
	require.NoError(t, err)
	control, err := connect.Control(testkit.RedisURL(t))
	require.NoError(t, err)
	publishing, err := connect.Control(testkit.RedisURL(t))
	require.NoError(t, err)
	publisher, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: publishing}, nil)
	require.NoError(t, err)
	config := Config{
		Client: blocking, Control: control, Group: group, Consumer: rand.Text(),
		BlockTimeout: 20 * time.Millisecond, MinIdle: 800 * time.Millisecond, ClaimInterval: 200 * time.Millisecond,
		// The suite refuses a message hundreds of times, and expects immediate redelivery.
		MaxDeliveries: 1000, RedeliveryDelay: time.Millisecond, RedeliveryDelayMax: 10 * time.Millisecond,
		DrainTimeout: 200 * time.Millisecond, Logger: testkit.Logger(t),
		DeadLetter: func(_ context.Context, entry Entry, reason error) error {
			t.Errorf("entry %s became a dead letter: %v", entry.ID, reason)
			return nil
		},
	}
	if c.change != nil {
		c.change(&config)
	}
	sub, err := NewSubscriber(config)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, sub.Close())
		_, _ = blocking.Close(), control.Close()
	})
	return publisher, sub
}

// inOneGroup gives all subscribers of a test the same group, so that they share the messages and
// must claim what the closed ones leave pending.
func (c conformance) inOneGroup(t *testing.T) (message.Publisher, message.Subscriber) {
	return c.pair(t, t.Name())
}

func (c conformance) context() tests.TestContext {
	return tests.TestContext{TestID: tests.NewTestID(), Features: c.features}
}

// The part of the suite that every Pub/Sub has to pass. Delivery is at least once. It is in the order of
// the stream only where one message is in flight at a time, which the next test checks.
func TestSubscriberConformance(t *testing.T) {
	t.Parallel()
	c := newConformance(t, tests.Features{}, nil)
	tests.TestPubSub(t, c.features, c.inOneGroup, c.pair)
}

// BenchmarkSubscriber compares what message.Subscribers can deliver through a Router whose handler
// does nothing: one of ours and 64 of watermill-redisstream's. All entries are in the stream beforehand.
//
//	go test -run '^$' -bench BenchmarkSubscriber -benchtime 100000x ./stream
func BenchmarkSubscriber(b *testing.B) {
	b.Run("own", func(b *testing.B) {
		blocking, err := connect.Blocking(testkit.RedisURL(b))
		require.NoError(b, err)
		defer func() { _ = blocking.Close() }()
		control := testkit.Redis(b)
		sub, err := NewSubscriber(Config{
			Client: blocking, Control: control, Group: reservation.Group, Consumer: "bench",
			DeadLetter: func(context.Context, Entry, error) error { return nil },
			Logger:     slog.New(slog.DiscardHandler),
		})
		require.NoError(b, err)
		benchmarkConsumption(b, []message.Subscriber{sub})
	})
	b.Run("stock-64", func(b *testing.B) {
		subs := make([]message.Subscriber, 64)
		for i := range subs {
			options, err := redis.ParseURL(testkit.RedisURL(b))
			require.NoError(b, err)
			sub, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
				Client: redis.NewClient(options), ConsumerGroup: reservation.Group,
				Consumer: fmt.Sprint("bench-", i), DisableIndefiniteInitialBlock: true,
			}, nil)
			require.NoError(b, err)
			subs[i] = sub // closes its client
		}
		benchmarkConsumption(b, subs)
	})
}

// benchmarkConsumption handles b.N entries of one stream, and ends when all of them are acknowledged.
func benchmarkConsumption(b *testing.B, subs []message.Subscriber) {
	rdb := testkit.Redis(b)
	stream := testkit.Keys(b).Orders(0)
	fillStream(b, rdb, stream, b.N)
	require.NoError(b, CreateGroup(b.Context(), rdb, stream, reservation.Group))

	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(b, err)
	var left atomic.Int64
	left.Store(int64(b.N))
	done := make(chan struct{})
	for i, sub := range subs {
		router.AddConsumerHandler(fmt.Sprint("bench-", i), stream, sub, func(*message.Message) error {
			if left.Add(-1) == 0 {
				close(done)
			}
			return nil
		})
	}
	b.ReportAllocs()
	b.ResetTimer()
	stopped := make(chan error)
	go func() { stopped <- router.Run(b.Context()) }()
	<-done
	for rdb.XPending(b.Context(), stream, reservation.Group).Val().Count > 0 { // a round trip each
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	require.NoError(b, router.Close())
	require.NoError(b, <-stopped)
}

// fillStream appends entries that look like those of lua/reserve.lua.
func fillStream(b *testing.B, rdb redis.UniversalClient, stream string, n int) {
	const page = 1000
	sale := uuid.New()
	for sent := 0; sent < n; sent += page {
		_, err := rdb.Pipelined(b.Context(), func(pipe redis.Pipeliner) error {
			for i := sent; i < min(n, sent+page); i++ {
				pipe.XAdd(b.Context(), &redis.XAddArgs{Stream: stream, Values: Values(order.OrderReserved{
					OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "user-1", Quantity: 1, Epoch: 1, Sequence: int64(i),
					ReservedAt: time.Now(),
				})})
			}
			return nil
		})
		require.NoError(b, err)
	}
}
