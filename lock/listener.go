package lock

import (
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
	s := &subscriptions{waiters: ws, pubsub: ws.rdb.Subscribe(ws.running), keys: make(map[string][]string)}
	defer func() { _ = s.pubsub.Close() }()
	var messages <-chan any
	idle := time.NewTicker(ws.settings.listenIdle)
	defer idle.Stop()
	quiet := false // no waiter since the last tick
	for {
		if s.follow(li) {
			quiet = false
			if messages == nil {
				messages = s.pubsub.ChannelWithSubscriptions(redis.WithChannelSize(messagesMax))
			}
		}
		select {
		case <-li.wake:
		case <-s.again:
		case message := <-messages:
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
	pubsub *redis.PubSub
	keys   map[string][]string // of each channel
	// unsure are channels to which the client may not be subscribed. They are tried again.
	unsure []string
	again  <-chan time.Time
}

// follow subscribes to the channels of keys that have waiters now, and leaves the others. It reports
// whether it subscribed.
func (s *subscriptions) follow(li *listener) bool {
	subscribe, unsubscribe := s.pubsub.Subscribe, s.pubsub.Unsubscribe
	if s.clustered {
		subscribe, unsubscribe = s.pubsub.SSubscribe, s.pubsub.SUnsubscribe
	}
	begin, end := s.subscriptionChanges(li, s.keys)
	// First the ends: x and {x} share a channel, which one may leave when the other one comes.
	if len(end) > 0 {
		_ = unsubscribe(s.running, end...) // an error ends the connection, and all subscriptions
	}
	begin = append(begin, s.unsure...)
	begin = slices.DeleteFunc(begin, func(channel string) bool { return len(s.keys[channel]) == 0 })
	s.unsure = nil
	if len(begin) > 0 && subscribe(s.running, begin...) != nil {
		// The client may have connected again before it knew of these channels. Until the next try
		// waiters poll.
		s.unsure, s.again = begin, time.After(outagePauseMax)
	}
	return len(begin) > 0
}

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
		if strings.HasSuffix(m.Kind, "unsubscribe") { // a late confirmation of its beginning does not count
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
