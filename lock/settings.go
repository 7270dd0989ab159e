package lock

import (
	"fmt"
	"time"
)

const (
	defaultLease  = 30 * time.Second // the default of Redisson's watchdog
	defaultPoll   = time.Second
	defaultPrefix = "lock"
	// defaultListenIdle saves a new connection for each waiter where few wait.
	defaultListenIdle = 5 * time.Second

	// defaultYield is about the time in which a Java thread wakes on a message and asks, on a busy
	// machine.
	defaultYield = 2 * time.Millisecond

	minPoll = 10 * time.Millisecond
)

// settings belong to a Locker and do not change after New. Each acquire checks them.
type settings struct {
	lease    time.Duration
	poll     time.Duration
	prefix   string
	observer Observer
	// listenIdle is how long the connection for release messages stays open without a waiter. No
	// Option sets it.
	listenIdle time.Duration
	// yield is how long waiters here leave a lock that was released here to each other process that
	// listens for it. No Option sets it.
	yield time.Duration
}

func defaults() settings {
	return settings{
		lease: defaultLease, poll: defaultPoll, prefix: defaultPrefix,
		listenIdle: defaultListenIdle, yield: defaultYield,
	}
}

// Option changes a setting of a Locker.
type Option func(*settings)

// WithLease sets the lease of locks that are acquired without For: MinLease to MaxLease, 30 s by
// default. It is renewed every third of its length until Release. A dead holder blocks a key for at
// most this time.
func WithLease(lease time.Duration) Option { return func(s *settings) { s.lease = lease } }

// WithPoll sets how often a waiter asks Redis without a message: 10 ms or more, 1 s by default.
// Messages are lost when a connection breaks. It also bounds the pause between two attempts while
// Redis is unavailable.
func WithPoll(poll time.Duration) Option { return func(s *settings) { s.poll = poll } }

// WithPrefix sets the prefix of the Locker's own keys, "lock" by default: the counter of fencing
// tokens (prefix:fence) and the receipts of calls (prefix:receipt:…). All who lock the same keys
// must use the same prefix, or their tokens do not compare. In a Redis Cluster the names also carry
// the hash tag of the locks, unless the prefix has it.
func WithPrefix(prefix string) Option { return func(s *settings) { s.prefix = prefix } }

// WithObserver reports what the Locker does.
func WithObserver(o Observer) Option { return func(s *settings) { s.observer = o } }

// Observer receives what a Locker does, for metrics. Each function may be nil. They run
// concurrently and in the path of callers, so they should count and return.
type Observer struct {
	// Acquired reports locks taken from Redis, and the time since the call began.
	Acquired func(locks int, waited time.Duration)
	// Reentered reports locks taken that their owner already held.
	Reentered func(locks int)
	// Busy reports locks that others hold. A waiting Acquire reports them for each attempt.
	Busy func(locks int)
	// Unreachable reports each attempt of a waiting Acquire that failed because Redis is
	// unavailable.
	Unreachable func(locks int, err error)
	// Renewed reports the renewals of one script call, how long it took, and its error.
	Renewed func(locks int, took time.Duration, err error)
	// Lost reports locks that their holder lost.
	Lost func(locks int)
	// Released reports locks released in Redis. A lock that was reported lost may be among them, if
	// Redis still had it.
	Released func(locks int)
}

func (o *Observer) acquired(locks int, since time.Time) {
	if o.Acquired != nil && locks > 0 {
		o.Acquired(locks, time.Since(since))
	}
}

func (o *Observer) unreachable(locks int, err error) {
	if o.Unreachable != nil {
		o.Unreachable(locks, err)
	}
}

func (o *Observer) renewed(locks int, sent time.Time, err error) {
	if o.Renewed != nil && locks > 0 {
		o.Renewed(locks, time.Since(sent), err)
	}
}

func (o *Observer) reentered(locks int) { report(o.Reentered, locks) }
func (o *Observer) busy(locks int)      { report(o.Busy, locks) }
func (o *Observer) lost(locks int)      { report(o.Lost, locks) }
func (o *Observer) released(locks int)  { report(o.Released, locks) }

func report(f func(int), locks int) {
	if f != nil && locks > 0 {
		f(locks)
	}
}

// AcquireOption changes one acquire.
type AcquireOption func(*terms)

// terms are the options of one acquire.
type terms struct {
	lease time.Duration
	// watched leases are renewed until Release.
	watched bool
}

// For sets a lease that is not renewed: MinLease to MaxLease, cut to whole milliseconds. It counts
// from before the call to Redis. When a lock is reentered, For extends what is left of its lease if
// that is shorter, and never shortens it.
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

// drift is how much shorter a lease is here than in Redis, because two clocks do not run at the
// same pace and Redis counts whole milliseconds. The formula is Redlock's.
func drift(lease time.Duration) time.Duration { return lease/100 + 2*time.Millisecond }
