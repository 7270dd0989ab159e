package ingress

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

// outageLogEvery is how often an outage gets a line in the log: a crowd meets it a thousand times a second.
const outageLogEvery = time.Second

// outageLog writes the first error of every second and says how many it left out before.
type outageLog struct {
	quiet cooldown
	left  atomic.Int64
}

func (l *outageLog) log(ctx context.Context, log *slog.Logger, route string, err error) {
	if !l.quiet.begin(outageLogEvery) {
		l.left.Add(1)
		return
	}
	log.ErrorContext(ctx, "request failed", "route", route, "error", err, "left_out", l.left.Swap(0))
}

// cooldown is a time in which something is not to be done again.
type cooldown struct{ untilNanos atomic.Int64 }

// begin starts a cooldown, unless one is under way: then it is false.
func (c *cooldown) begin(length time.Duration) bool {
	now := time.Now()
	until := c.untilNanos.Load()
	return now.UnixNano() >= until && c.untilNanos.CompareAndSwap(until, now.Add(length).UnixNano())
}

// breaker keeps a crowd from waiting for a server that does not answer: while it fails, one request
// now and then tries whether it is back, and the others are turned away at once.
type breaker struct {
	failing atomic.Bool
	probe   cooldown
}

// admits tells whether to ask the server. While it fails that is true once in every.
func (b *breaker) admits(every time.Duration) bool { return !b.failing.Load() || b.probe.begin(every) }

// admitsAside is admits for somebody who has probes of his own, and so takes none from the others.
func (b *breaker) admitsAside(own *cooldown, every time.Duration) bool {
	return !b.failing.Load() || own.begin(every)
}

// failed is called when the server did not answer; the first probe is due after every.
func (b *breaker) failed(every time.Duration) {
	b.probe.begin(every)
	b.failing.Store(true)
}

// answered is called when the server did.
func (b *breaker) answered() {
	if b.failing.Load() {
		b.failing.Store(false)
	}
}
