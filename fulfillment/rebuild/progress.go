package rebuild

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
	"stampede/internal/retry"
)

const (
	// stepNamedAfter is how long a step of a rebuild may take until the log names it, and whom it waits for.
	stepNamedAfter = 2 * time.Second
	// stepNamedEvery is how often it is named again.
	stepNamedEvery = 10 * time.Second
	// rivalNamedEvery is how often a worker that has found something to rebuild names the session that keeps it from that.
	rivalNamedEvery = 10 * time.Second
)

// What the log says of rebuilds that take their time.
const (
	stillAtStep    = "the rebuild is still at this step"
	rebuildWaits   = "the rebuild waits for locks in Postgres"
	rebuildFailed  = "cannot rebuild the stock: it is tried again, and stays closed until then"
	otherRebuilds  = "something is to be rebuilt: waiting for another rebuild to end"
	rebuildingPart = "rebuilding the stock of a partition from Postgres: its sales are closed until that is done"
	rebuildingSale = "rebuilding the stock of a sale from Postgres: it is closed until that is done"
)

// rebuildStep is what a rebuild is at.
type rebuildStep struct {
	doing string
	sale  uuid.UUID // uuid.Nil for all of them
	since time.Time
}

// at notes the step that begins.
func (b *build) at(doing string) { b.atSale(doing, uuid.Nil) }

func (b *build) atSale(doing string, sale uuid.UUID) {
	b.step.Store(&rebuildStep{doing, sale, time.Now()})
}

// watch names in the log the steps that take long, until stop is called.
func (b *build) watch(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		ticks := time.NewTicker(stepNamedAfter / 2)
		defer ticks.Stop()
		var named *rebuildStep
		var due time.Time
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-ticks.C:
				step := b.step.Load()
				if step != named {
					named, due = step, step.since.Add(stepNamedAfter)
				}
				if !now.Before(due) {
					due = now.Add(stepNamedEvery)
					b.name(ctx, step, now)
				}
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

// name names a step in the log, with the sessions that hold locks for which others wait.
func (b *build) name(ctx context.Context, step *rebuildStep, now time.Time) {
	fields := []any{"step", step.doing, "for", now.Sub(step.since).Round(time.Millisecond)}
	if step.sale != b.of.Sale { // which the log names anyway
		fields = append(fields, "sale", step.sale)
	}
	limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	found, err := pg.Blockers(limited, b.config.Pool)
	switch {
	case ctx.Err() != nil: // the rebuild has ended
	case err != nil:
		b.log.Warn(stillAtStep, append(fields, "error", err)...)
	case len(found) == 0:
		b.log.Warn(stillAtStep, fields...)
	default:
		b.log.Warn(rebuildWaits, append(fields, "held_by", namesOf(found))...)
	}
}

// rebuildTrouble is what a Rebuilder remembers from one look to the next, so that the log can tell
// why it goes on. There are as many entries as things that could not be rebuilt.
type rebuildTrouble struct {
	mu     sync.Mutex
	failed map[Need]failedRebuild
	// rivalNamed is when it was last said that another process rebuilds.
	rivalNamed time.Time
}

type failedRebuild struct {
	tries int
	last  string // the error
}

// before returns what is to be said of earlier tries to rebuild this.
func (t *rebuildTrouble) before(n Need) []any {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, failed := t.failed[n.target()]; failed {
		return []any{"failed_tries", f.tries, "last_error", f.last}
	}
	return nil
}

// note notes how a try has ended. It is true for an error other than that of the last try: the next
// one tells all others.
func (t *rebuildTrouble) note(n Need, err error) (isNew bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n = n.target()
	if err == nil {
		delete(t.failed, n)
		return false
	}
	if t.failed == nil {
		t.failed = map[Need]failedRebuild{}
	}
	f := t.failed[n]
	isNew = f.last != err.Error()
	t.failed[n] = failedRebuild{f.tries + 1, err.Error()}
	return isNew
}

// keep forgets what is not to be rebuilt any more.
func (t *rebuildTrouble) keep(found []Need) {
	t.mu.Lock()
	defer t.mu.Unlock()
	is := make(map[Need]bool, len(found))
	for _, n := range found {
		is[n.target()] = true
	}
	for n := range t.failed {
		if !is[n] {
			delete(t.failed, n)
		}
	}
}

// target is what is to be rebuilt, for whatever reason.
func (n Need) target() Need { return Need{partition: n.partition, Sale: n.Sale} }

// nameRival says, now and then, which session has the lock of rebuilds.
func (r *Rebuilder) nameRival(ctx context.Context, found []Need) {
	r.trouble.mu.Lock()
	due := time.Since(r.trouble.rivalNamed) >= rivalNamedEvery
	if due {
		r.trouble.rivalNamed = time.Now()
	}
	r.trouble.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	holder, err := pg.Holder(ctx, r.config.Pool, pg.RebuildLock)
	if errors.Is(err, pgx.ErrNoRows) {
		return // it has ended
	}
	fields := []any{"reason", found[0].Reason, "partition", found[0].partition}
	if err != nil {
		fields = append(fields, "error", err)
	} else {
		fields = append(fields, "held_by", holder.String())
	}
	r.config.Logger.Warn(otherRebuilds, fields...)
}

// blockersNamed is how many sessions a line of the log names at most.
const blockersNamed = 5

func namesOf(found []pg.Activity) []string {
	names := make([]string, 0, blockersNamed)
	for i := range found[:min(len(found), blockersNamed)] {
		names = append(names, found[i].String())
	}
	return names
}
