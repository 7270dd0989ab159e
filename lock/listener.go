package lock

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// messagesMax is how many messages may be buffered. Handling one takes almost no time.
const messagesMax = 1000

// listener receives the releases of all keys over one connection; in a cluster, of the keys of one
// hash tag. Guarded by Locker.mu.
type listener struct {
	// changed are keys whose queue was created or removed.
	changed []string
	wake    chan struct{}
}

// updateListener makes a listener check whether a key has waiters, and starts it if needed. Callers
// hold mu.
func (ws *waiters) updateListener(key string) {
	if ws.closed {
		return
	}
	name := ws.slot(key)
	li := ws.listeners[name]
	if li == nil {
		li = &listener{wake: make(chan struct{}, 1)}
		ws.listeners[name] = li
		ws.tasks.Go(func() { ws.runListener(name, li) })
	}
	li.changed = append(li.changed, key)
	signal(li.wake)
}

// runListener subscribes to the channels of keys with waiters and wakes the first waiter of a
// released lock. After each new subscription, also after a lost connection, the first waiter asks
// Redis: the release may have come before. It ends after a time without waiters.
func (ws *waiters) runListener(name string, li *listener) {
	s := &subscriptions{
		waiters: ws, pubsub: ws.rdb.Subscribe(ws.running),
		keys: make(map[string][]string), unconfirmed: make(map[string]time.Time),
	}
	defer func() { _ = s.pubsub.Close() }()
	idle := time.NewTicker(ws.settings.listenIdle)
	defer idle.Stop()
	quiet := false // no waiter since the last tick
	for {
		if s.follow(li) {
			quiet = false
		}
		select {
		case <-li.wake:
		case <-s.again:
			s.repeat()
		case message := <-s.messages:
			if m, ok := message.(*redis.Subscription); ok && !ends(m) {
				delete(s.unconfirmed, m.Channel)
			}
			ws.handleMessage(message, s.keys)
		case <-idle.C:
			if quiet && ws.endListener(name, li) {
				return
			}
			quiet = len(s.keys) == 0
		case <-ws.running.Done():
			return
		}
	}
}

// subscriptions are the channels of one listener.
type subscriptions struct {
	*waiters
	pubsub   *redis.PubSub
	messages <-chan any
	keys     map[string][]string // of each channel
	// unconfirmed holds when the channels were asked for that Redis has not confirmed. A refusal, as
	// while a cluster does not know the node of a slot, is not reported by the client.
	unconfirmed map[string]time.Time
	again       <-chan time.Time // nil if all are confirmed
}

// follow subscribes to the channels of keys that have waiters now, and leaves the others. It reports
// whether it subscribed.
func (s *subscriptions) follow(li *listener) bool {
	begin, end := s.subscriptionChanges(li, s.keys)
	// First the ends: x and {x} share a channel, which one may leave when the other one comes.
	if len(end) > 0 {
		unsubscribe := s.pubsub.Unsubscribe
		if s.clustered {
			unsubscribe = s.pubsub.SUnsubscribe
		}
		_ = unsubscribe(s.running, end...) // an error ends the connection, and all subscriptions
	}
	begin = slices.DeleteFunc(begin, func(channel string) bool { return len(s.keys[channel]) == 0 })
	if len(begin) > 0 {
		s.subscribe(begin)
	}
	return len(begin) > 0
}

// subscribe is repeated for the channels that are not confirmed in time. Until then waiters poll.
func (s *subscriptions) subscribe(channels []string) {
	subscribe := s.pubsub.Subscribe
	if s.clustered {
		subscribe = s.pubsub.SSubscribe
	}
	_ = subscribe(s.running, channels...) // after an error nothing is confirmed
	for _, channel := range channels {
		s.unconfirmed[channel] = time.Now()
	}
	if s.messages == nil {
		s.messages = s.pubsub.ChannelWithSubscriptions(redis.WithChannelSize(messagesMax))
	}
	if s.again == nil {
		s.again = time.After(outagePauseMax)
	}
}

// repeat subscribes again to the channels that were not confirmed in time. In a cluster it does so for
// all channels and over a new connection, because their slot may be on another node.
func (s *subscriptions) repeat() {
	s.again = nil
	var late []string
	for channel, asked := range s.unconfirmed {
		switch {
		case len(s.keys[channel]) == 0:
			delete(s.unconfirmed, channel)
		case time.Since(asked) >= outagePauseMax:
			late = append(late, channel)
		}
	}
	switch {
	case len(late) > 0 && s.clustered:
		_ = s.pubsub.Close()
		s.pubsub, s.messages = s.rdb.Subscribe(s.running), nil
		s.subscribe(slices.Collect(maps.Keys(s.keys)))
	case len(late) > 0:
		s.subscribe(late)
	case len(s.unconfirmed) > 0:
		s.again = time.After(outagePauseMax)
	}
}

// ends reports whether a subscription has ended.
func ends(m *redis.Subscription) bool { return strings.HasSuffix(m.Kind, "unsubscribe") }

// subscriptionChanges returns the channels to subscribe to and to unsubscribe from, and updates
// subscribed.
func (ws *waiters) subscriptionChanges(li *listener, subscribed map[string][]string) (begin, end []string) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, key := range li.changed {
		channel := releaseChannel(key)
		keys, waits := subscribed[channel], ws.queues[key] != nil
		listens := slices.Contains(keys, key)
		switch {
		case waits && len(keys) == 0:
			subscribed[channel] = []string{key}
			ws.channels[channel]++
			begin = append(begin, channel)
		case waits:
			if !listens {
				subscribed[channel] = append(keys, key) // x and {x} share a channel
			}
			ws.wakeFirst(key) // no new subscription will
		case listens && len(keys) > 1:
			subscribed[channel] = slices.DeleteFunc(keys, func(other string) bool { return other == key })
		case listens:
			delete(subscribed, channel)
			end = append(end, channel)
		}
	}
	li.changed = li.changed[:0]
	return begin, end
}

func (ws *waiters) handleMessage(message any, subscribed map[string][]string) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	switch m := message.(type) {
	case *redis.Message:
		for _, key := range subscribed[m.Channel] {
			ws.onRelease(key)
		}
	case *redis.Subscription: // also the end of one, where subscribed has no keys
		if ends(m) { // a late confirmation of its beginning does not count
			ws.unsubscribed(m.Channel, len(subscribed[m.Channel]) > 0)
		}
		for _, key := range subscribed[m.Channel] {
			ws.wakeFirst(key)
		}
	}
}

// unsubscribed records that Redis confirmed the end of a subscription. Callers hold mu.
func (ws *waiters) unsubscribed(channel string, wanted bool) {
	left := ws.channels[channel] - 1
	switch {
	case left > 0:
		ws.channels[channel] = left
	case !wanted: // otherwise the client subscribes again by itself
		delete(ws.channels, channel)
	}
}

func (ws *waiters) endListener(name string, li *listener) bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(li.changed) > 0 {
		return false
	}
	delete(ws.listeners, name)
	if len(ws.listeners) == 0 {
		clear(ws.channels)
	}
	return true
}
