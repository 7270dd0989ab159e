package lock

import (
	"context"
	"time"
)

// WithListenIdle sets how long the connection that hears of releases stays open with nobody to wait.
func WithListenIdle(idle time.Duration) Option { return func(s *settings) { s.listenIdle = idle } }

// Waiting is how many wait for a key in this process.
func (l *Locker) Waiting(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.waiting.queues[key]; q != nil {
		return len(q.waiters)
	}
	return 0
}

// Endings is how many contexts are to end with the lease.
func (le *Lease) Endings() int {
	le.locker.mu.Lock()
	defer le.locker.mu.Unlock()
	return len(le.endings)
}

// Running ends when the Locker is closed.
func (l *Locker) Running() context.Context { return l.running }
