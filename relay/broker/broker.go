// Package broker hands events to streams in Redis and topics of Kafka, as Watermill messages, and to standard output.
package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"stampede/relay/feed"
)

// Calls at the same time. A publisher has one answer for each message, so a single caller would wait for each of them.
const (
	redisInFlight = 16
	// KafkaInFlight is the InFlight of a Kafka publisher.
	KafkaInFlight = 256
)

const (
	kafkaTimeout = 10 * time.Second
	kafkaRetries = 3
)

// Metadata of a message.
const (
	metaContentType  = "content-type"
	metaPartitionKey = "partitionkey"
	// metaTraceParent is only in the messages of events that are traced.
	metaTraceParent = "traceparent"
)

// Publisher sends each event as a message whose id is the event's. It is safe for concurrent use.
type Publisher struct {
	to       message.Publisher
	topic    string
	inFlight int
}

// Redis returns a Publisher for a stream, which keeps about so many of its newest entries, or all with 0. It owns the
// client.
func Redis(client redis.UniversalClient, stream string, maxLen int64) (*Publisher, error) {
	to, err := redisstream.NewPublisher(
		redisstream.PublisherConfig{Client: client, DefaultMaxlen: maxLen}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("publish to Redis: %w", err)
	}
	return &Publisher{to: to, topic: stream, inFlight: redisInFlight}, nil
}

// Kafka returns a Publisher for a topic. It connects to the brokers.
func Kafka(brokers []string, topic, client string) (*Publisher, error) {
	config := sarama.NewConfig()
	config.ClientID = client
	config.Version = sarama.V2_0_0_0
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Retry.Max = kafkaRetries
	config.Producer.Timeout = kafkaTimeout
	config.Net.DialTimeout, config.Net.ReadTimeout, config.Net.WriteTimeout = kafkaTimeout, kafkaTimeout, kafkaTimeout
	config.Metadata.Retry.Max = 1
	to, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: brokers, OverwriteSaramaConfig: config,
		Marshaler: kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) {
			return m.Metadata.Get(metaPartitionKey), nil
		}),
	}, watermill.NopLogger{})
	if err != nil {
		return nil, fmt.Errorf("publish to Kafka: %w", err)
	}
	return &Publisher{to: to, topic: topic, inFlight: KafkaInFlight}, nil
}

// InFlight is how many calls of Send are useful at the same time.
func (p *Publisher) InFlight() int { return p.inFlight }

// Send publishes an event and returns nil when the broker has it.
func (p *Publisher) Send(ctx context.Context, e *feed.Event) error {
	m := message.NewMessageWithContext(ctx, e.ID, e.Body)
	m.Metadata = message.Metadata{metaContentType: feed.ContentType, metaPartitionKey: e.Subject}
	if e.TraceParent != "" {
		m.Metadata[metaTraceParent] = e.TraceParent
	}
	return p.to.Publish(p.topic, m)
}

// Close closes the connections.
func (p *Publisher) Close() error { return p.to.Close() }

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

// Send writes an event. While nobody reads the output it waits, until ctx is done.
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
