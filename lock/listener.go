package lock

import (
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// messagesMax is how many messages may be buffered. Handling one takes almost no time.
	messagesMax = 1000

	channelPrefix = "redisson_lock__channel:"
)

// endedMax bounds waiting.ended.
const endedMax = 1024

// channelOf names the channel that announces a release, as Redisson does.
func channelOf(key string) string {
	if strings.Contains(key, "{") {
		return channelPrefix + key
	}
	return channelPrefix + "{" + key + "}"
}

// listener receives the releases of all keys over one connection; in a cluster, of the keys of one
// hash tag. Guarded by Locker.mu.
type listener struct {
	// changed are keys whose queue was created or removed.
	changed []string
	wake    chan struct{}
}

// listenerOf names the listener for a key. A cluster announces a release on the node of the lock.
func (l *Locker) listenerOf(key string) string {
	if l.clustered {
		return hashTag(key)
	}
	return ""
}

// updateListener makes a listener check whether a key has waiters, and starts it if needed. Callers
// hold mu.
func (l *Locker) updateListener(key string) {
	if l.closed {
		return
	}
	name := l.listenerOf(key)
	li := l.waiting.listeners[name]
	if li == nil {
		li = &listener{wake: make(chan struct{}, 1)}
		l.waiting.listeners[name] = li
		l.tasks.Go(func() { l.runListener(name, li) })
	}
	li.changed = append(li.changed, key)
	signal(li.wake)
}

// runListener subscribes to the channels of keys with waiters and wakes the first waiter of a
// released lock. After each new subscription, also after a lost connection, the first waiter asks
// Redis: the release may have come before. It ends after a time without waiters.
func (l *Locker) runListener(name string, li *listener) {
	pubsub := l.rdb.Subscribe(l.running)
	subscribe, unsubscribe := pubsub.Subscribe, pubsub.Unsubscribe
	if l.clustered {
		subscribe, unsubscribe = pubsub.SSubscribe, pubsub.SUnsubscribe
	}
	defer func() { _ = pubsub.Close() }()
	subscribed := make(map[string][]string) // the keys of each channel
	var messages <-chan any
	idle := time.NewTicker(l.listenIdle)
	defer idle.Stop()
	quiet := false      // no waiter since the last tick
	var unsure []string // channels to which the client may not be subscribed
	var again <-chan time.Time
	for {
		begin, end := l.subscriptionChanges(li, subscribed)
		// First the ends: x and {x} share a channel, which one may leave when the other one comes.
		if len(end) > 0 {
			_ = unsubscribe(l.running, end...) // an error ends the connection, and all subscriptions
		}
		begin = append(begin, unsure...)
		begin = slices.DeleteFunc(begin, func(channel string) bool { return len(subscribed[channel]) == 0 })
		unsure = nil
		if len(begin) > 0 {
			quiet = false
			if subscribe(l.running, begin...) != nil {
				// The client may have connected again before it knew of these channels. Until the next
				// try waiters poll.
				unsure = begin
				again = time.After(outagePauseMax)
			}
		}
		if messages == nil && len(begin) > 0 {
			messages = pubsub.ChannelWithSubscriptions(redis.WithChannelSize(messagesMax))
		}
		select {
		case <-li.wake:
		case <-again:
		case message := <-messages:
			l.handleMessage(message, subscribed)
		case <-idle.C:
			if quiet && l.endListener(name, li) {
				return
			}
			quiet = len(subscribed) == 0
		case <-l.running.Done():
			return
		}
	}
}

// subscriptionChanges returns the channels to subscribe to and to unsubscribe from, and updates
// subscribed.
func (l *Locker) subscriptionChanges(li *listener, subscribed map[string][]string) (begin, end []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range li.changed {
		channel := channelOf(key)
		keys, waits := subscribed[channel], l.waiting.queues[key] != nil
		listens := slices.Contains(keys, key)
		switch {
		case waits && len(keys) == 0:
			subscribed[channel] = []string{key}
			l.waiting.channels[channel]++
			begin = append(begin, channel)
		case waits:
			if !listens {
				subscribed[channel] = append(keys, key) // x and {x} share a channel
			}
			l.waiting.wakeFirst(key) // no new subscription will
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

func (l *Locker) handleMessage(message any, subscribed map[string][]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch m := message.(type) {
	case *redis.Message:
		for _, key := range subscribed[m.Channel] {
			l.waiting.onRelease(key)
		}
	case *redis.Subscription: // also the end of one, where subscribed has no keys
		if strings.HasSuffix(m.Kind, "unsubscribe") { // a late confirmation of its beginning does not count
			l.unsubscribed(m.Channel, len(subscribed[m.Channel]) > 0)
		}
		for _, key := range subscribed[m.Channel] {
			l.waiting.wakeFirst(key)
		}
	}
}

// unsubscribed records that Redis confirmed the end of a subscription. Callers hold mu.
func (l *Locker) unsubscribed(channel string, wanted bool) {
	left := l.waiting.channels[channel] - 1
	switch {
	case left > 0:
		l.waiting.channels[channel] = left
	case !wanted: // otherwise the client subscribes again by itself
		l.endChannel(channel)
	}
}

func (l *Locker) endListener(name string, li *listener) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(li.changed) > 0 {
		return false
	}
	delete(l.waiting.listeners, name)
	if len(l.waiting.listeners) == 0 {
		for channel := range l.waiting.channels {
			l.endChannel(channel)
		}
	}
	return true
}

// endChannel records that this process no longer listens on a channel. Callers hold mu.
func (l *Locker) endChannel(channel string) {
	ws := &l.waiting
	delete(ws.channels, channel)
	if len(ws.ended) >= endedMax {
		clear(ws.ended) // entries matter for the time of one call
	}
	ws.ended[channel] = l.serial
}
