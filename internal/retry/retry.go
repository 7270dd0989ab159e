// Package retry holds pauses and the delays between retries, and logs an outage as two lines: one when
// it begins, one when it ends.
package retry

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"golang.org/x/time/rate"
)

// Delays between the retries of a failing operation.
const (
	outageDelay    = 50 * time.Millisecond
	outageDelayMax = 2 * time.Second
)

// A flapping operation gets its first outagesLogged outages logged, then one per outageEvery.
const (
	outagesLogged = 5
	outageEvery   = 10 * time.Second
)

// Outage logs a run of failures as two lines: one when it begins, one when it ends. It is not safe for
// concurrent use.
type Outage struct {
	Log *slog.Logger
	// Doing names the operation: "read the stream".
	Doing string

	began time.Time
	tries int
	// logged is true if the current run got its first line.
	logged bool
	// unlogged counts the failures of earlier runs that were not logged.
	unlogged int
	lines    rate.Sometimes
}

// Failed records a failure and returns the delay before the next try.
func (o *Outage) Failed(err error) time.Duration {
	if o.tries == 0 {
		o.began, o.logged = time.Now(), false
		o.lines.First, o.lines.Interval = outagesLogged, outageEvery
	}
	o.tries++
	if !o.logged {
		o.lines.Do(func() { o.log(err) })
	}
	return Delay(o.tries, outageDelay, outageDelayMax)
}

func (o *Outage) log(err error) {
	attrs := []any{slog.Any("error", err)}
	if o.unlogged > 0 {
		attrs = append(attrs, slog.Int("failed_tries_before", o.unlogged))
	}
	o.Log.Error("cannot "+o.Doing+", trying again", attrs...)
	o.logged, o.unlogged = true, 0
}

// Over records a success, which ends the outage.
func (o *Outage) Over() {
	switch {
	case o.tries == 0:
		return
	case !o.logged:
		o.unlogged, o.tries = o.unlogged+o.tries, 0
		return
	}
	o.Log.Info("can "+o.Doing+" again", slog.Int("failed_tries", o.tries), slog.Duration("after", time.Since(o.began)))
	o.tries = 0
}

// Lasts reports whether the last try failed.
func (o *Outage) Lasts() bool { return o.tries > 0 }

// Note calls Failed or Over, for callers that retry at their own pace.
func (o *Outage) Note(err error) {
	if err != nil {
		o.Failed(err)
	} else {
		o.Over()
	}
}

// Delay doubles from first with each try, up to longest, minus a random part of up to a half: callers
// that failed together do not retry together.
func Delay(try int, first, longest time.Duration) time.Duration {
	delay := longest
	if shift := try - 1; shift < 30 && first<<shift < longest {
		delay = first << shift
	}
	return delay - rand.N(delay/2+1)
}

// CallTimeout limits one call to Redis, except for blocking reads.
const CallTimeout = 3 * time.Second

// ForCall returns a context for one call. It has the values of ctx but is not cancelled with it: a call
// that has begun should finish.
func ForCall(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), CallTimeout)
}

// Pause waits for d. It returns false if done is closed before d has passed, and immediately if done
// is already closed.
func Pause(d time.Duration, done <-chan struct{}) bool {
	select {
	case <-done:
		return false
	default:
	}
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// Join is errors.Join, but says each text once: of servers that fail alike, one answer is enough.
func Join(errs ...error) error {
	var different []error
	said := map[string]bool{}
	for _, err := range errs {
		if err != nil && !said[err.Error()] {
			said[err.Error()] = true
			different = append(different, err)
		}
	}
	return errors.Join(different...)
}
