package lock

import (
	"time"
)

// Observer is told what a Locker does, for metrics. Each function may be nil. They are called one after
// another or at the same time, while somebody waits: they should count, and return.
type Observer struct {
	// Acquired is called when so many locks were taken from Redis, after that time since the call.
	Acquired func(locks int, waited time.Duration)
	// Reentered is called when so many locks were taken that their owner held already.
	Reentered func(locks int)
	// Busy is called when so many locks were refused because others hold them; for an Acquire that
	// waits, every time that it looks in vain.
	Busy func(locks int)
	// Unreachable is called with the error when Redis could not be asked for so many locks and an Acquire waits
	// until it can be, every time that it tries.
	Unreachable func(locks int, err error)
	// Renewed is called when so many locks were asked to be renewed in one call, with its error.
	Renewed func(locks int, took time.Duration, err error)
	// Lost is called when a holder is told that it lost so many locks.
	Lost func(locks int)
	// Released is called when so many locks were given back to Redis, which may still have had one that was
	// counted as lost here.
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

func (o *Observer) reentered(locks int) { tell(o.Reentered, locks) }

func (o *Observer) busy(locks int) { tell(o.Busy, locks) }

func (o *Observer) lost(locks int) { tell(o.Lost, locks) }

func (o *Observer) released(locks int) { tell(o.Released, locks) }

func tell(f func(int), locks int) {
	if f != nil && locks > 0 {
		f(locks)
	}
}
