//go:build system

package stream

import (
	"crypto/rand"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
)

func (c conformance) inOwnGroup(t *testing.T) (message.Publisher, message.Subscriber) {
	return c.pair(t, rand.Text())
}

func TestSubscriberConformanceInOrder(t *testing.T) {
	t.Parallel()
	c := newConformance(t, tests.Features{GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true},
		func(config *Config) { config.InFlightMax = 1 })
	t.Run("PublishSubscribeInOrder", func(t *testing.T) {
		t.Parallel()
		tests.TestPublishSubscribeInOrder(t, c.context(), c.inOneGroup)
	})
	t.Run("NoAck", func(t *testing.T) {
		t.Parallel()
		tests.TestNoAck(t, c.context(), c.inOneGroup)
	})
}

// A new group receives everything that the stream holds.
func TestSubscriberConformanceWithNewGroups(t *testing.T) {
	t.Parallel()
	c := newConformance(t, tests.Features{NewSubscriberReceivesOldMessages: true}, nil)
	tests.TestNewSubscriberReceivesOldMessages(t, c.context(), c.inOwnGroup)
}
