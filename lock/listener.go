package lock

import (
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// messagesMax is how many messages may wait to be told to their waiters, which takes no time.
	messagesMax = 1000

	channelPrefix = "redisson_lock__channel:"
)

// endedMax bounds the channels that are noted as ended.
const endedMax = 1024

// channelOf names the channel on which the release of a lock is told, as Redisson does.
func channelOf(key string) string {
	if strings.Contains(key, "{") {
		return channelPrefix + key
	}
	return channelPrefix + "{" + key + "}"
}

// listener hears of releases on one connection: that of all keys or, in a cluster, of those of one slot.
// Guarded by Locker.mu.
type listener struct {
	// changed are keys whose queue began or ended.
	changed []string
	wake    chan struct{}
}

// listenerOf names the listener that hears of a key. A cluster tells of a release on the lock's node.
func (l *Locker) listenerOf(key string) string {
	if l.clustered {
		return hashTag(key)
	}
	return ""
}

// updateListener has a listener look whether anybody waits for a key. It needs mu.
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

// listen subscribes to what is waited for, and wakes the first who waits for a lock when it is released.
// Each time that a subscription begins, also anew after a lost connection, somebody has to look: the
// release may have come before it. It ends when nobody has waited for a while.
func (l *Locker) runListener(name string, li *listener) {
	pubsub := l.rdb.Subscribe(l.running)
	subscribe, unsubscribe := pubsub.Subscribe, pubsub.Unsubscribe
	if l.clustered {
		subscribe, unsubscribe = pubsub.SSubscribe, pubsub.SUnsubscribe
	}
	defer func() { _ = pubsub.Close() }()
	subscribed := make(map[string][]string) // the keys of each channel that is subscribed to
	var messages <-chan any
	idle := time.NewTicker(l.listenIdle)
	defer idle.Stop()
	quiet := false // for a whole tick, nobody waited
	for {
		begin, end := l.subscriptionChanges(li, subscribed)
		// Their errors are of no use: the channels are noted, and subscribed to when the connection is
		// there again. Until then, waiters look for themselves.
		if len(begin) > 0 {
			_ = subscribe(l.running, begin...)
			quiet = false
		}
		if len(end) > 0 {
			_ = unsubscribe(l.running, end...)
		}
		if messages == nil && len(begin) > 0 {
			messages = pubsub.ChannelWithSubscriptions(redis.WithChannelSize(messagesMax))
		}
		select {
		case <-li.wake:
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

// subscriptionChanges returns the channels on which to listen from now, and those on which no longer, and notes
// them in subscribed.
func (l *Locker) subscriptionChanges(li *listener, subscribed map[string][]string) (begin, end []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range li.changed {
		channel := channelOf(key)
		keys, waits := subscribed[channel], l.waiting.queues[key] != nil
		hears := slices.Contains(keys, key)
		switch {
		case waits && len(keys) == 0:
			subscribed[channel] = []string{key}
			l.waiting.channels[channel]++
			begin = append(begin, channel)
		case waits:
			if !hears {
				subscribed[channel] = append(keys, key) // x and {x} share a channel
			}
			l.waiting.wakeFirst(key) // no new subscription will
		case hears && len(keys) > 1:
			subscribed[channel] = slices.DeleteFunc(keys, func(other string) bool { return other == key })
		case hears:
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
	case *redis.Subscription: // or the end of one, where nobody waits any more
		if strings.HasSuffix(m.Kind, "unsubscribe") { // a late word of the beginning must not pass for it
			l.unsubscribed(m.Channel, len(subscribed[m.Channel]) > 0)
		}
		for _, key := range subscribed[m.Channel] {
			l.waiting.wakeFirst(key)
		}
	}
}

// unsubscribed notes that a subscription to a channel ended, by the word of Redis. It needs mu.
func (l *Locker) unsubscribed(channel string, wanted bool) {
	left := l.waiting.channels[channel] - 1
	switch {
	case left > 0:
		l.waiting.channels[channel] = left
	case !wanted: // or the client subscribes again by itself
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

// endChannel notes that no listener hears a channel any more. It needs mu.
func (l *Locker) endChannel(channel string) {
	ws := &l.waiting
	delete(ws.channels, channel)
	if len(ws.ended) >= endedMax {
		clear(ws.ended) // it was for the time of one call
	}
	ws.ended[channel] = l.serial
}
