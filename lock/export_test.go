package lock

import (
	"context"
	"time"
)

// WithListenIdle sets how long the connection for release messages stays open without a waiter.
func WithListenIdle(idle time.Duration) Option { return func(s *settings) { s.listenIdle = idle } }

// WithYield sets how long a lock released here is left to each other process that waits for it.
func WithYield(yield time.Duration) Option { return func(s *settings) { s.yield = yield } }

// Waiting is the number of waiters for a key in this process.
func (l *Locker) Waiting(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiters.queues[key]; q != nil {
		return len(q.waiters)
	}
	return 0
}

// Listeners is how many connections listened for the release of a key at the last attempt of a
// waiter here, or at the last release here.
func (l *Locker) Listeners(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiters.queues[key]; q != nil {
		return q.listeners
	}
	return 0
}

// MayListen reports whether Redis may still count this process as a listener for a key.
func (l *Locker) MayListen(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiters.channels[releaseChannel(key)] > 0
}

// Callbacks is how many contexts end with the lease.
func (le *Lease) Callbacks() int {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return len(le.callbacks)
}

// Running ends when the Locker is closed.
func (l *Locker) Running() context.Context { return l.running }
