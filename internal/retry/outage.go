package retry

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"golang.org/x/time/rate"
)

// The waits between the tries of a call to Redis while it is away.
const (
	outageDelay    = 50 * time.Millisecond
	outageDelayMax = 2 * time.Second
)

// What fails and recovers all the time gets so many outages told of, and then one in a while.
const (
	OutagesTold = 5
	outageEvery = 10 * time.Second
)

// Outage makes two log lines of a run of failures: one when it begins, one when it is over. It is
// for one goroutine.
type Outage struct {
	Log *slog.Logger
	// Doing is what fails: "read the stream".
	Doing string

	began time.Time
	Tries int
	// told is true if the run got its first line. Untold counts failures in runs that got none.
	told   bool
	untold int
	lines  rate.Sometimes
}

// Failed notes a failure and returns how long to wait for the next try.
func (o *Outage) Failed(err error) time.Duration {
	if o.Tries == 0 {
		o.began, o.told = time.Now(), false
		o.lines.First, o.lines.Interval = OutagesTold, outageEvery
	}
	o.Tries++
	if !o.told {
		o.lines.Do(func() { o.tell(err) })
	}
	return RetryDelay(o.Tries, outageDelay, outageDelayMax)
}

func (o *Outage) tell(err error) {
	attrs := []any{slog.Any("error", err)}
	if o.untold > 0 {
		attrs = append(attrs, slog.Int("failed_tries_before", o.untold))
	}
	o.Log.Error("cannot "+o.Doing+", trying again", attrs...)
	o.told, o.untold = true, 0
}

// Over notes a success.
func (o *Outage) Over() {
	switch {
	case o.Tries == 0:
		return
	case !o.told:
		o.untold, o.Tries = o.untold+o.Tries, 0
		return
	}
	o.Log.Info("can "+o.Doing+" again", slog.Int("failed_tries", o.Tries), slog.Duration("after", time.Since(o.began)))
	o.Tries = 0
}

// Note notes either, for what is tried again at a pace of its own.
func (o *Outage) Note(err error) {
	if err != nil {
		o.Failed(err)
	} else {
		o.Over()
	}
}

// RetryDelay doubles with every try from first up to longest, and takes a random part of up to a
// half off, so that those who failed together do not come back together.
func RetryDelay(try int, first, longest time.Duration) time.Duration {
	delay := longest
	if shift := try - 1; shift < 30 && first<<shift < longest {
		delay = first << shift
	}
	return delay - rand.N(delay/2+1)
}

// CallTimeout bounds one call to Redis beside the reads, where the client heeds contexts.
const CallTimeout = 3 * time.Second

// ForCall returns a context for one call: with the values of ctx, and not cancelled with it, because a
// call that has begun is worth finishing.
func ForCall(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), CallTimeout)
}
