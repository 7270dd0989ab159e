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

// active tells whether one is under way.
func (c *cooldown) active() bool { return time.Now().UnixNano() < c.untilNanos.Load() }
