package ingress

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// outageLogEvery is how often an outage gets a line in the log: a crowd meets it a thousand times a second.
const outageLogInterval = time.Second

// outageLog writes the first error of every second and says how many it left out before.
type outageLog struct {
	cooldown cooldown
	skipped  atomic.Int64
}

func (l *outageLog) log(ctx context.Context, log *slog.Logger, route string, err error) {
	if !l.cooldown.start(outageLogInterval) {
		l.skipped.Add(1)
		return
	}
	log.ErrorContext(ctx, "request failed", "route", route, "error", err, "left_out", l.skipped.Swap(0))
}

// cooldown is a time in which something is not to be done again.
type cooldown struct{ untilNanos atomic.Int64 }

// begin starts a cooldown, unless one is under way: then it is false.
func (c *cooldown) start(length time.Duration) bool {
	now := time.Now()
	until := c.untilNanos.Load()
	return now.UnixNano() >= until && c.untilNanos.CompareAndSwap(until, now.Add(length).UnixNano())
}

const (
	// probeTimeout bounds one probe of the breaker, and probeAgain is the time between two.
	probeTimeout  = time.Second
	probeInterval = 250 * time.Millisecond
)

// breaker keeps a crowd from waiting for a Postgres that does not answer. A look that fails is no proof: it may be slow by
// itself, or have waited for its connection. So the breaker asks on a connection that nobody else uses. It opens when
// that is not answered, and goes on asking until it is. It is safe for concurrent use.
type breaker struct {
	probe      func(context.Context) error
	background *background
	log        *slog.Logger

	isOpen, probing atomic.Bool
	// answeredNanos is when Postgres was last seen to answer.
	succeededNanos atomic.Int64
}

// answered is called when Postgres has answered somebody.
func (b *breaker) succeeded() { b.succeededNanos.Store(time.Now().UnixNano()) }

// doubt is called when a look that began then was not answered. It does nothing if another one was answered since.
func (b *breaker) failed(began time.Time) {
	if b.succeededNanos.Load() < began.UnixNano() && b.probing.CompareAndSwap(false, true) {
		b.background.start(b.probeUntilAnswered)
	}
}

// ask opens the breaker if Postgres does not answer, and closes it when it does.
func (b *breaker) probeUntilAnswered(ctx context.Context) {
	defer b.probing.Store(false)
	for {
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		err := b.probe(limited)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			b.succeeded()
			if b.isOpen.Swap(false) {
				b.log.Info("Postgres answers again")
			}
			return
		case !b.isOpen.Swap(true):
			b.log.Warn("Postgres does not answer: orders are shown as Redis and this server know them", "error", err)
		}
		select {
		case <-time.After(probeInterval):
		case <-ctx.Done():
			return
		}
	}
}
