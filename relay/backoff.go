package relay

import (
	"errors"
	"math/rand/v2"
	"time"

	"stampede/relay/webhook"
)

const (
	backoffFirst = time.Second
	backoffMax   = 24 * time.Hour
	backoffMin   = 50 * time.Millisecond
)

// backoff is the pause after so many failures in a row: random, up to a limit that doubles from a second to a day (full
// jitter, https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). A receiver that asks for a longer
// pause gets it.
func backoff(failures int, err error) time.Duration {
	limit := backoffMax
	if shift := failures - 1; shift < 20 && backoffFirst<<shift < backoffMax {
		limit = backoffFirst << shift
	}
	pause := max(backoffMin, rand.N(limit))
	if refusal, ok := errors.AsType[*webhook.Refusal](err); ok {
		pause = max(pause, refusal.RetryAfter)
	}
	return pause
}

// isFinal reports whether the receiver wants no more events.
func isFinal(err error) bool {
	refusal, ok := errors.AsType[*webhook.Refusal](err)
	return ok && refusal.Final()
}
