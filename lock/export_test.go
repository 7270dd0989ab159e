package lock

import (
	"context"
	"time"
)

// WithListenIdle sets how long the connection that hears of releases stays open with nobody to wait.
func WithListenIdle(idle time.Duration) Option { return func(s *settings) { s.listenIdle = idle } }

// WithYield sets how long a lock that was released here is left to each other process that waits for it.
func WithYield(yield time.Duration) Option { return func(s *settings) { s.yield = yield } }

// Waiting is how many wait for a key in this process.
func (l *Locker) Waiting(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiting.queues[key]; q != nil {
		return len(q.waiters)
	}
	return 0
}

// Listeners is how many connections listened for the release of a key when one who waits for it here asked last.
func (l *Locker) Listeners(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiting.queues[key]; q != nil {
		return q.listeners
	}
	return 0
}

// Hears tells whether this process may listen for the release of a key: Redis has not said that it does not.
func (l *Locker) Hears(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting.channels[channelOf(key)] > 0
}

// Callbacks is how many contexts are to end with the lease.
func (le *Lease) Callbacks() int {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return len(le.callbacks)
}

// Running ends when the Locker is closed.
func (l *Locker) Running() context.Context { return l.running }
