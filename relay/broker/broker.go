// Package broker sends events to streams in Redis and topics of Kafka, as Watermill messages, and to standard output.
package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/twmb/franz-go/pkg/kgo"

	"stampede/relay/feed"
)

// Calls at the same time. A publisher has one answer for each message, so a single caller would wait for each of them.
const (
	redisInFlight = 16
	kafkaInFlight = 256
)

// headerID is the header of Kafka that holds the id of a message in watermill-kafka.
const headerID = "_watermill_message_uuid"

// metadata returns the metadata of an event's message.
func metadata(e *feed.Event) message.Metadata {
	all := message.Metadata{"content-type": feed.ContentType, "partitionkey": e.Subject}
	if e.TraceParent != "" {
		all["traceparent"] = e.TraceParent
	}
	return all
}

// Stream sends each event to a stream in Redis, as a message whose id is the event's. It is safe for concurrent
// use.
type Stream struct {
	to   message.Publisher
	name string
}

// NewStream returns a Stream, which keeps about so many of its newest entries, or all with 0. It owns the client.
func NewStream(client redis.UniversalClient, name string, maxLen int64) (*Stream, error) {
	to, err := redisstream.NewPublisher(
		redisstream.PublisherConfig{Client: client, DefaultMaxlen: maxLen}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("publish to Redis: %w", err)
	}
	return &Stream{to: to, name: name}, nil
}

// InFlight is how many calls of Send are useful at the same time.
func (*Stream) InFlight() int { return redisInFlight }

// Send publishes an event and returns nil when Redis has it.
func (s *Stream) Send(ctx context.Context, e *feed.Event) error {
	m := message.NewMessageWithContext(ctx, e.ID, e.Body)
	m.Metadata = metadata(e)
	return s.to.Publish(s.name, m)
}

// Close closes the connections.
func (s *Stream) Close() error { return s.to.Close() }

// Topic sends each event to a topic of Kafka, in the form of watermill-kafka. It is safe for concurrent use.
type Topic struct {
	client *kgo.Client
	name   string
}

// NewTopic returns a Topic. It connects with its first event.
func NewTopic(brokers []string, name, client string) (*Topic, error) {
	to, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...), kgo.ClientID(client), kgo.AllowAutoTopicCreation(),
		kgo.DialTimeout(kafkaTimeout), kgo.ProduceRequestTimeout(kafkaTimeout), kgo.RecordDeliveryTimeout(kafkaTimeout),
		kgo.RetryTimeout(kafkaTimeout), kgo.RequestRetries(kafkaRetries), kgo.RecordRetries(kafkaRetries),
		// The relay repeats what fails, so that duplicates are possible anyway; and this needs no rights to the cluster.
		kgo.DisableIdempotentWrite(), kgo.MaxProduceRequestsInflightPerBroker(kafkaRequests),
		// The events that wait for the requests in flight are a batch.
		kgo.ProducerLinger(0), kgo.ProducerBatchCompression(kgo.NoCompression()),
	)
	if err != nil {
		return nil, fmt.Errorf("publish to Kafka: %w", err)
	}
	return &Topic{client: to, name: name}, nil
}

const (
	kafkaTimeout  = 10 * time.Second
	kafkaRetries  = 3
	kafkaRequests = 5
)

// InFlight is how many calls of Send are useful at the same time.
func (*Topic) InFlight() int { return kafkaInFlight }

// Send publishes an event and returns nil when all in-sync replicas have it. Its key is the subject, so that the events
// of a subject are in one partition.
func (t *Topic) Send(ctx context.Context, e *feed.Event) error {
	headers := []kgo.RecordHeader{{Key: headerID, Value: []byte(e.ID)}}
	for key, value := range metadata(e) {
		headers = append(headers, kgo.RecordHeader{Key: key, Value: []byte(value)})
	}
	record := &kgo.Record{Topic: t.name, Key: []byte(e.Subject), Value: e.Body, Headers: headers}
	return t.client.ProduceSync(ctx, record).FirstErr()
}

// Close closes the connections.
func (t *Topic) Close() error {
	t.client.Close()
	return nil
}

// Lines writes each event as a line of JSON.
type Lines struct {
	// turn is full while a line is written: a Mutex could not be left at the end of a context.
	turn chan struct{}
	to   io.Writer
	torn bool
}

// NewLines returns a Lines that writes to w, which no other may write to: a line that nobody reads is written later.
func NewLines(w io.Writer) *Lines { return &Lines{turn: make(chan struct{}, 1), to: w} }

// InFlight is 1: lines are in the order of their positions.
func (*Lines) InFlight() int { return 1 }

// Send writes an event. While nobody reads the output it waits, until ctx ends.
func (l *Lines) Send(ctx context.Context, e *feed.Event) error {
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errStdout, ctx.Err())
	}
	line, written := slices.Concat(e.Body, []byte{'\n'}), make(chan error, 1)
	go func() { // nothing can end a write to a pipe that is full
		written <- l.write(line)
		<-l.turn
	}()
	select {
	case err := <-written:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errStdout, ctx.Err())
	}
}

var errStdout = errors.New("write to standard output")

func (l *Lines) write(line []byte) error {
	if l.torn {
		line = append([]byte{'\n'}, line...) // ends what was written of the line that failed
	}
	n, err := l.to.Write(line)
	if n > 0 {
		l.torn = line[n-1] != '\n'
	}
	if err != nil {
		return errors.Join(errStdout, err)
	}
	return nil
}

// Close does nothing: the output belongs to the process.
func (*Lines) Close() error { return nil }
