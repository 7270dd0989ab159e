package fulfillment

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/metrics"
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
func (w *Worker) guard(ctx context.Context, rebuilder *Rebuilder, partitions int) {
	looking := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRebuild, "make sure that Redis has what was sold")
	var endedDue time.Time
	for failed := 0; ; {
		withEnded := !time.Now().Before(endedDue)
		if withEnded {
			endedDue = time.Now().Add(guardEndedInterval)
		}
		tried, err := rebuilder.heal(ctx, partitions, withEnded)
		if ctx.Err() != nil {
			return
		}
		looking.Note(err)
		if failed++; !tried || err == nil {
			failed = 0
		}
		if !pause.For(retry.RetryDelay(1+failed, w.config.GuardInterval, max(guardDelayMax, w.config.GuardInterval)), ctx.Done()) {
			return
		}
	}
}

// heal rebuilds what has to be, unless somebody else is at it. Tried is true if it began to. An error in one
// partition keeps it from no other.
func (r *Rebuilder) heal(ctx context.Context, partitions int, withEnded bool) (tried bool, err error) {
	found, err := r.needs(ctx, partitions, withEnded)
	if err == nil {
		r.trouble.keep(found)
	}
	if len(found) == 0 {
		return false, err
	}
	session, err := r.begin(ctx)
	if errors.Is(err, ErrRebuildUnderWay) {
		r.nameRival(ctx, found)
		return false, nil // it may be what was found
	} else if err != nil {
		return false, err
	}
	defer session.Close()
	// Somebody may have been at it a moment ago; from here on nobody is.
	found, err = r.needs(ctx, partitions, withEnded)
	failed := []error{err}
	for _, n := range found {
		if n.Sale == uuid.Nil {
			_, err = r.partition(ctx, session, n.partition, n.Reason)
		} else {
			_, err = r.sale(ctx, session, n.Sale, n.Reason)
		}
		if ctx.Err() != nil {
			return true, ctx.Err()
		}
		failed = append(failed, err)
	}
	return len(found) > 0, errors.Join(failed...)
}
