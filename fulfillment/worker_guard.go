package fulfillment

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"stampede/internal/pause"
)

const (
	// guardDelayMax bounds the wait after a rebuild that failed, which doubles. Each try raises an epoch.
	guardDelayMax = 15 * time.Second
	// guardEndedInterval is how often sales that are over are looked at as well: a rebuild that was broken off may
	// have left them closed, which keeps nobody from buying.
	guardEndedInterval = 15 * time.Second
)

// guard looks again and again whether Redis still has what Postgres says that it must have, in partitions
// 0 to n-1, and has it made anew where it has not, until ctx ends. All workers do it; one of them rebuilds.
func (w *Worker) guard(ctx context.Context, rebuilder *Rebuilder, partitions int) {
	looking := newTrouble(w.config.Logger, w.metrics, "rebuild", "make sure that Redis has what was sold")
	var endedDue time.Time
	for {
		withEnded := !time.Now().Before(endedDue)
		if withEnded {
			endedDue = time.Now().Add(guardEndedInterval)
		}
		err := rebuilder.heal(ctx, partitions, withEnded)
		if ctx.Err() != nil {
			return
		}
		looking.note(err)
		delay := retryDelay(1+looking.tries, w.config.GuardInterval, max(guardDelayMax, w.config.GuardInterval))
		if !pause.For(delay, ctx.Done()) {
			return
		}
	}
}

// heal rebuilds what has to be, unless somebody else is at it.
func (r *Rebuilder) heal(ctx context.Context, partitions int, withEnded bool) error {
	found, err := r.needs(ctx, partitions, withEnded)
	if err != nil || len(found) == 0 {
		return err
	}
	session, err := r.begin(ctx)
	if errors.Is(err, ErrRebuildUnderWay) {
		return nil // it may be what was found
	} else if err != nil {
		return err
	}
	defer session.close()
	// Somebody may have been at it a moment ago; from here on nobody is.
	if found, err = r.needs(ctx, partitions, withEnded); err != nil {
		return err
	}
	var failed []error
	for _, n := range found {
		if n.sale == uuid.Nil {
			_, err = r.partition(ctx, session, n.partition, n.reason)
		} else {
			_, err = r.sale(ctx, session, n.sale, n.reason)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}
