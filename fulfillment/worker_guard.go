package fulfillment

import (
	"context"
	"time"

	"stampede/fulfillment/metrics"
	"stampede/fulfillment/rebuild"
	"stampede/internal/pause"
	"stampede/internal/retry"
)

const (
	// guardDelayMax bounds the wait after a rebuild that failed, which doubles. Each try raises an epoch.
	guardDelayMax = 5 * time.Second
	// guardEndedInterval is how often sales that are over are looked at as well: a rebuild that was broken off may
	// have left them closed, which keeps nobody from buying.
	guardEndedInterval = 15 * time.Second
)

// guard looks again and again whether Redis still has what Postgres says that it must have, in partitions
// 0 to n-1, and has it made anew where it has not, until ctx ends. All workers do it; one of them rebuilds.
func (w *Worker) guard(ctx context.Context, rebuilder *rebuild.Rebuilder, partitions int) {
	looking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRebuild,
		"make sure that Redis has what was sold")
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
		looking.Note(err)
		if failed++; !tried || err == nil {
			failed = 0
		}
		if !pause.For(retry.RetryDelay(1+failed, w.config.GuardInterval, max(guardDelayMax, w.config.GuardInterval)),
			ctx.Done()) {
			return
		}
	}
}
