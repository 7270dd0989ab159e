package lock

import (
	"fmt"
	"time"
)

const (
	defaultLease  = 30 * time.Second // as Redisson's watchdog has it
	defaultPoll   = time.Second
	defaultPrefix = "lock"
	// defaultListenIdle spares those who wait now and then a new connection each time.
	defaultListenIdle = 5 * time.Second

	// defaultYield is about how long a thread of Java takes to be woken by a message and to ask, on a busy machine.
	defaultYield = 2 * time.Millisecond

	minPoll = 10 * time.Millisecond
)

// settings are a Locker's, and do not change after New. Each is checked when a lock is asked for.
type settings struct {
	lease    time.Duration
	poll     time.Duration
	prefix   string
	observer Observer
	// listenIdle is how long the connection that hears of releases stays open with nobody to wait. No Option
	// sets it.
	listenIdle time.Duration
	// yield is how long those who wait here leave a lock that was released here to each other process that listens
	// for its release. No Option sets it.
	yield time.Duration
}

func defaults() settings {
	return settings{lease: defaultLease, poll: defaultPoll, prefix: defaultPrefix, listenIdle: defaultListenIdle, yield: defaultYield}
}

// Option changes a setting of a Locker.
type Option func(*settings)

// WithLease sets the lease of the locks that are acquired without For, and renewed every third of it
// until they are released: MinLease to MaxLease, 30 s if not set. A dead holder blocks a key for as long.
func WithLease(lease time.Duration) Option { return func(s *settings) { s.lease = lease } }

// WithPoll sets after which time a waiter looks for itself if no message wakes it: 10 ms or more, 1 s if
// not set. It is also how long a waiter pauses at most between two tries to reach a Redis that is away. Messages are lost when the connection breaks; a lock that runs out sends none, but waiters
// know when it does.
func WithPoll(poll time.Duration) Option { return func(s *settings) { s.poll = poll } }

// WithPrefix sets how the names of the Locker's own keys begin: the counter of the fencing tokens,
// prefix:fence, and the receipts of calls, prefix:receipt:…; "lock" if not set. All who lock the same keys
// have to use the same prefix, or their tokens do not compare. In a Redis Cluster, the hash tag of the
// locks is added to the names, unless the prefix has it already.
func WithPrefix(prefix string) Option { return func(s *settings) { s.prefix = prefix } }

// WithObserver has the Locker tell what it does.
func WithObserver(o Observer) Option { return func(s *settings) { s.observer = o } }

// AcquireOption changes one acquire.
type AcquireOption func(*terms)

// terms are what one acquire asks for beside its keys.
type terms struct {
	lease time.Duration
	// watched leases are renewed until they are released.
	watched bool
}

// For sets an explicit lease, which is not renewed, from MinLease to MaxLease and cut to whole
// milliseconds. It counts from before Redis was asked. On going deeper into a lock, it makes what is
// left of the lock's lease that long if it is shorter; it never shortens it.
func For(lease time.Duration) AcquireOption {
	return func(t *terms) { *t = terms{lease: lease} }
}

func (s *settings) terms(opts []AcquireOption) (terms, error) {
	t := terms{lease: s.lease, watched: true}
	for _, opt := range opts {
		opt(&t)
	}
	switch {
	case t.lease < MinLease || t.lease > MaxLease:
		return t, fmt.Errorf("%w: a lease of %v, want %v to %v", ErrInvalid, t.lease, MinLease, MaxLease)
	case s.poll < minPoll:
		return t, fmt.Errorf("%w: a poll of %v, want at least %v", ErrInvalid, s.poll, minPoll)
	case s.prefix == "" || len(s.prefix) > MaxKeyBytes:
		return t, fmt.Errorf("%w: a prefix of %d bytes, want 1 to %d", ErrInvalid, len(s.prefix), MaxKeyBytes)
	}
	t.lease = t.lease.Truncate(time.Millisecond)
	return t, nil
}

// drift is what a lease is shorter here than in Redis: two clocks never run at the same pace, and Redis
// counts in whole milliseconds. It is Redlock's.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }
