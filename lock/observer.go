package lock

import "time"

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
