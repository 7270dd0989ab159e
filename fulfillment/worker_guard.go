package fulfillment

import (
	"context"
	"time"

	"stampede/fulfillment/metrics"
	"stampede/fulfillment/rebuild"
	"stampede/internal/retry"
)

const (
	// guardDelayMax bounds the wait after a failed rebuild, which doubles. Each try raises an
	// epoch.
	guardDelayMax = 5 * time.Second
	// guardEndedInterval is how often ended sales are checked as well: an interrupted rebuild may
	// have left them closed, which blocks no buyer.
	guardEndedInterval = 15 * time.Second
)

// guard checks repeatedly whether Redis has all that Postgres requires, in the first partitions, and rebuilds what is
// missing, until ctx ends. All workers check; one rebuilds.
func (w *Worker) guard(ctx context.Context, rebuilder *rebuild.Rebuilder, partitions int) {
	checking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRebuild,
		"check that Redis has all sales and orders")
	var endedDue time.Time
	for failed := 0; ; {
		withEnded := !time.Now().Before(endedDue)
		if withEnded {
			endedDue = time.Now().Add(guardEndedInterval)
		}
		tried, err := rebuilder.Heal(ctx, partitions, withEnded)
		if ctx.Err() != nil {
			return
		}
		checking.Note(err)
		if failed++; !tried || err == nil {
			failed = 0
		}
		if !retry.Pause(
			retry.Delay(1+failed, w.config.GuardInterval, max(guardDelayMax, w.config.GuardInterval)), ctx.Done(),
		) {
			return
		}
	}
}
