package fulfillment

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
	outagesTold = 5
	outageEvery = 10 * time.Second
)

// outage makes two log lines of a run of failures: one when it begins, one when it is over. It is
// for one goroutine.
type outage struct {
	log *slog.Logger
	// doing is what fails: "read the stream".
	doing string

	began time.Time
	tries int
	// told is true if the run got its first line. Untold counts failures in runs that got none.
	told   bool
	untold int
	lines  rate.Sometimes
}

// failed notes a failure and returns how long to wait for the next try.
func (o *outage) failed(err error) time.Duration {
	if o.tries == 0 {
		o.began, o.told = time.Now(), false
		o.lines.First, o.lines.Interval = outagesTold, outageEvery
	}
	o.tries++
	if !o.told {
		o.lines.Do(func() { o.tell(err) })
	}
	return retryDelay(o.tries, outageDelay, outageDelayMax)
}

func (o *outage) tell(err error) {
	attrs := []any{slog.Any("error", err)}
	if o.untold > 0 {
		attrs = append(attrs, slog.Int("failed_tries_before", o.untold))
	}
	o.log.Error("cannot "+o.doing+", trying again", attrs...)
	o.told, o.untold = true, 0
}

// over notes a success.
func (o *outage) over() {
	switch {
	case o.tries == 0:
		return
	case !o.told:
		o.untold, o.tries = o.untold+o.tries, 0
		return
	}
	o.log.Info("can "+o.doing+" again", slog.Int("failed_tries", o.tries), slog.Duration("after", time.Since(o.began)))
	o.tries = 0
}

// note notes either, for what is tried again at a pace of its own.
func (o *outage) note(err error) {
	if err != nil {
		o.failed(err)
	} else {
		o.over()
	}
}

// retryDelay doubles with every try from first up to longest, and takes a random part of up to a
// half off, so that those who failed together do not come back together.
func retryDelay(try int, first, longest time.Duration) time.Duration {
	delay := longest
	if shift := try - 1; shift < 30 && first<<shift < longest {
		delay = first << shift
	}
	return delay - rand.N(delay/2+1)
}

// callTimeout bounds one call to Redis beside the reads, where the client heeds contexts.
const callTimeout = 3 * time.Second

// forCall returns a context for one call: with the values of ctx, and not cancelled with it, because a
// call that has begun is worth finishing.
func forCall(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
}
