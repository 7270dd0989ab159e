package stream

import (
	"context"
	"crypto/rand"
	"log"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
)

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
