package ingress

import (
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

// isOutage reports whether a problem is worth a log line, because our own servers are at fault: a refusal, a
// client that has left, and an overload, which the metrics count, are not.
func isOutage(ctx context.Context, p *problem) bool {
	return p.status >= http.StatusInternalServerError && p.slug != kindOverloaded.slug &&
		p != problemRestockWithdrawn && ctx.Err() == nil
}

// outageLogInterval bounds the log lines of an outage, which a crowd would write a thousand times a second.
const outageLogInterval = time.Second

// outageLog logs the first error of each interval, and how many it skipped before.
type outageLog struct {
	cooldown cooldown
	skipped  atomic.Int64
}

func (l *outageLog) log(ctx context.Context, log *slog.Logger, route string, err error, ids func() []any) {
	if !l.cooldown.start(outageLogInterval) {
		l.skipped.Add(1)
		return
	}
	log.With(ids()...).ErrorContext(ctx, "request failed", "route", route, "error", err, "skipped", l.skipped.Swap(0))
}

// cooldown is a time in which something is not repeated.
type cooldown struct{ untilNanos atomic.Int64 }

// start returns false during a cooldown; otherwise it starts one.
func (c *cooldown) start(length time.Duration) bool {
	now := time.Now()
	until := c.untilNanos.Load()
	return now.UnixNano() >= until && c.untilNanos.CompareAndSwap(until, now.Add(length).UnixNano())
}
