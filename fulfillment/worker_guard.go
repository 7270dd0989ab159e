package fulfillment

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"stampede/fulfillment/metrics"
	"stampede/internal/retry"
	"stampede/upkeep/rebuild"
)

const (
	// guardDelayMax bounds the pause after a check, and the wait after a failed rebuild, which doubles. Each try raises
	// an epoch.
	guardDelayMax = 5 * time.Second
	// guardRest is how many times as long as a check the pause after it is, unless GuardInterval is longer: to check
	// tens of thousands of sales each second would take a tenth of a core of every worker.
	guardRest = 40
	// silentChecks is how many times as often partitions are checked while one does not answer: the server that replaces
	// its master sells nothing before a rebuild.
	silentChecks = 4
	// guardEndedInterval is how often ended sales are checked as well: an interrupted rebuild may
	// have left them closed, which blocks no buyer.
	guardEndedInterval = 15 * time.Second
	// helpInterval is how often the moves of units between the shards of a sale are completed.
	helpInterval = time.Second
	// helpSales bounds the sales of a partition that are helped at a time.
	helpSales = 8
)

// guard checks repeatedly whether Redis has all that Postgres requires in the partitions that this worker reads, and
// rebuilds what is missing, until ctx is done. One read of Postgres serves all partitions. Each is then checked alone,
// so an unreachable server or a rebuild delays no other partition. A partition with several readers is rebuilt by one.
func (w *Worker) guard(ctx context.Context) {
	reading := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRebuild,
		"read from Postgres what Redis must have")
	var guarded []*guardedPartition
	var checks sync.WaitGroup
	defer checks.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-w.takenOver:
		case <-ctx.Done():
			return
		}
		for p := len(guarded); p < int(w.partitions.Load()); p++ {
			guarded = append(guarded, w.guardedPartition(p))
		}
		w.guardAge.Guards(w.readPartitions())
		w.checkDue(ctx, guarded, reading, &checks)
		interval := w.config.GuardInterval
		if slices.ContainsFunc(guarded, func(g *guardedPartition) bool { return g.silent.Load() }) {
			interval /= silentChecks
		}
		timer.Reset(retry.Delay(1, interval, interval))
	}
}

// readPartitions are the partitions that this worker reads.
func (w *Worker) readPartitions() (partitions []int) {
	for p := range int(w.partitions.Load()) {
		if w.reads[p].Load() {
			partitions = append(partitions, p)
		}
	}
	return partitions
}

// checkDue starts the checks of the partitions that are due.
func (w *Worker) checkDue(
	ctx context.Context, guarded []*guardedPartition, reading *metrics.Trouble, checks *sync.WaitGroup,
) {
	now := time.Now()
	due := slices.DeleteFunc(slices.Clone(guarded), func(g *guardedPartition) bool { return !g.isDue(now) })
	if len(due) == 0 {
		return
	}
	withEnded := slices.ContainsFunc(due, func(g *guardedPartition) bool { return !now.Before(g.endedDue) })
	required, err := w.rebuilder.Required(ctx, withEnded)
	took := time.Since(now)
	if ctx.Err() != nil {
		return
	}
	if reading.Note(err); err != nil {
		return
	}
	for _, g := range due {
		if withEnded {
			g.endedDue = now.Add(guardEndedInterval)
		}
		if sales := required.ShardedAt(g.partition); len(sales) > 0 && !now.Before(g.helpDue) && !g.helping.Swap(true) {
			g.helpDue = now.Add(helpInterval)
			checks.Go(func() {
				defer g.helping.Store(false)
				g.help(ctx, sales)
			})
		}
		g.busy.Store(true)
		checks.Go(func() {
			defer g.busy.Store(false)
			g.check(ctx, required, took)
		})
	}
}

// guardedPartition is a partition that a worker guards. The fields below busy belong to its check while it is busy,
// and to the guard otherwise.
type guardedPartition struct {
	*Worker
	partition int
	checking  *metrics.Trouble

	busy          atomic.Bool
	silent        atomic.Bool // the last check got no answer
	due, endedDue time.Time
	failed        int // rebuilds, in a row

	helping atomic.Bool
	helpDue time.Time
}

func (w *Worker) guardedPartition(p int) *guardedPartition {
	return &guardedPartition{Worker: w, partition: p, checking: metrics.NewTrouble(
		w.config.Logger.With("partition", p), w.metrics, metrics.StepRebuild, "check that Redis has all sales and orders")}
}

// isDue reports whether the partition has to be checked now. If another worker reads it, that one checks it.
func (g *guardedPartition) isDue(now time.Time) bool {
	if g.busy.Load() {
		return false
	}
	if !g.reads[g.partition].Load() {
		g.silent.Store(false)
		g.checking.End()
		g.rebuilder.Leave(g.partition)
		return false
	}
	return !now.Before(g.due)
}

// check checks the partition once, and rebuilds it if need be. It took so long to read what is required.
func (g *guardedPartition) check(ctx context.Context, required *rebuild.Required, took time.Duration) {
	began := time.Now()
	tried, err := g.rebuilder.HealPartition(ctx, g.partition, required)
	if ctx.Err() != nil {
		return
	}
	if g.checking.Note(err); err == nil {
		g.guardAge.Verified(g.partition)
	}
	g.silent.Store(!tried && err != nil)
	g.due = time.Time{}
	if err == nil && !tried {
		g.due = time.Now().Add(pauseAfter(took + time.Since(began)))
	}
	if g.failed++; !tried || err == nil {
		g.failed = 0
		return
	}
	longest := max(guardDelayMax, g.config.GuardInterval)
	g.due = time.Now().Add(retry.Delay(1+g.failed, g.config.GuardInterval, longest))
}

// pauseAfter is the pause after a check that took so long.
func pauseAfter(took time.Duration) time.Duration { return min(guardRest*took, guardDelayMax) }

// help completes the moves of units between the shards of these sales that an ingress has left unfinished. The sales
// are independent: a shard that does not answer delays no other sale. Its partition is checked by its own guard, so
// the error is only for the details of the log.
func (g *guardedPartition) help(ctx context.Context, sales []rebuild.ShardedSale) {
	var helping errgroup.Group
	helping.SetLimit(helpSales)
	for _, sale := range sales {
		helping.Go(func() error {
			limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
			defer cancel()
			if err := g.config.Catalog.Store.HelpUnits(limited, sale.ID, sale.Layout, sale.Epoch); err != nil {
				g.config.Logger.Debug("cannot complete the moves of units between the shards of a sale", "sale", sale.ID,
					"error", err)
			}
			return nil
		})
	}
	_ = helping.Wait()
}
