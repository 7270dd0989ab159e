package batch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/metrics"
	"stampede/fulfillment/rebuild"
	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	// lockLeaseMax keeps leases short, however patient the claims of a deployment are: for so long a
	// worker that was killed and is back at once finds the users of its own entries locked.
	lockLeaseMax = 3 * time.Second

	// The waits of a batch of which everything was deferred.
	deferDelay    = 20 * time.Millisecond
	deferDelayMax = time.Second
)

// LockLease is the lease of a batch's locks where entries are claimed after minIdle: not longer than
// that, so that whoever claims the entries of a dead worker finds their users free.
func LockLease(minIdle time.Duration) time.Duration {
	return min(max(minIdle, lock.MinLease), lockLeaseMax)
}

// Config is what a batcher works with; all of it is needed.
type Config struct {
	Ledger    *ledger.Ledger
	Store     *reservation.Store
	Locker    *lock.Locker
	Keys      reservation.Keys
	Partition int
	BatchMax  int
	// Lease is how long a batch may keep its users. A transaction that takes longer goes on without
	// the locks: they save double work, and correctness does not rest on them. A lease that outlived
	// its worker would keep whoever claims that worker's entries from working on them.
	Lease   time.Duration
	Logger  *slog.Logger
	Metrics *metrics.Worker
	// Rebuilder is told what shows whether Redis lacks orders; nil for nobody.
	Rebuilder *rebuild.Rebuilder
}

// Batcher makes batches of the messages that the Router hands out one by one. Whatever arrives while
// a transaction is under way goes into the next one: there is no timer while there is nothing to wait
// for (pace), and a batch is as large as the last one took long.
//
// A second transaction begins while one is under way only for a full batch: then its rows are written while the first
// one waits for the disk, and no transaction is made for fewer orders than it could have. Batches that are under way
// at the same time have no user in common.
type Batcher struct {
	Config

	Queue *submissions
	// draining is closed when the worker stops: what is under way is finished, and what cannot be
	// finished at once is left to the next worker.
	draining  chan struct{}
	drainOnce sync.Once

	recording, locking, releasing *metrics.Trouble

	// most is how many orders one transaction records at most. It is fewer than batchMax for a while
	// after that took too long.
	most atomic.Int64
}

func New(config Config) *Batcher {
	config.Logger = config.Logger.With("partition", config.Partition)
	b := &Batcher{Config: config, Queue: newSubmissions(), draining: make(chan struct{})}
	b.most.Store(int64(config.BatchMax))
	b.recording = b.trouble(metrics.StepRecord, "record orders in Postgres")
	b.locking = b.trouble(metrics.StepLock, "lock the users of a batch, going on without")
	b.releasing = b.trouble(metrics.StepRelease, "give back the units of rejected orders")
	return b
}

func (b *Batcher) trouble(step, doing string) *metrics.Trouble {
	return metrics.NewTrouble(b.Logger, b.Metrics, step, doing)
}

// Drain lets what is under way finish, without waiting for what is away.
func (b *Batcher) Drain() { b.drainOnce.Do(func() { close(b.draining) }) }

// Process brings a batch to its end, but for the messages that have to wait for a later one.
func (b *Batcher) Process(ctx context.Context, f *inFlightBatch) {
	started := time.Now()
	defer func() {
		if p := recover(); p != nil {
			b.Logger.Error("panic in a batch; its messages are delivered again", "panic", p, "stack", string(debug.Stack()))
			// All of them, those that were to wait included: nobody else knows of them.
			for _, s := range f.Batch {
				s.resolve(fmt.Errorf("%w: %v", ledger.ErrPanicked, p))
			}
			f.Deferred, f.blocked = nil, nil
		}
	}()

	lease, ready, deferred := b.lockUsers(ctx, f.Batch)
	defer b.unlock(ctx, lease)
	if f.Deferred = deferred; len(ready) == 0 {
		return
	}
	events := inSaleOrder(ready)

	crashpoint.Hit(crashpoint.BeforePersist)
	outcomes := b.Record(ctx, events, f.apart)
	crashpoint.Hit(crashpoint.AfterCommit)
	if b.Rebuilder != nil {
		b.Rebuilder.Witnesses.Note(outcomes)
	}
	released := b.Release(ctx, outcomes)
	crashpoint.Hit(crashpoint.BeforeAck)

	for i, s := range ready {
		switch out := outcomes[i]; {
		case errors.Is(out.Err, ledger.ErrBlocked):
			f.blocked, f.why = append(f.blocked, s), out.Err
		case ledger.NeedsRelease(out) && !released:
			// Its units are not back: a later batch finds the order recorded and tries again.
			f.Deferred = append(f.Deferred, s)
		default:
			b.Metrics.Count(out)
			s.resolve(out.Err)
		}
	}
	b.Metrics.BatchOrders.Observe(float64(len(ready)))
	b.Metrics.BatchSeconds.Observe(time.Since(started).Seconds())
}

// inSaleOrder sorts the batch by sale and place in it, and returns its events.
func inSaleOrder(batch []*submission) []order.OrderReserved {
	slices.SortStableFunc(batch, func(x, y *submission) int { return ledger.ByPlaceInSale(x.Event, y.Event) })
	events := make([]order.OrderReserved, len(batch))
	for i, s := range batch {
		events[i] = s.Event
	}
	return events
}

// lockUsers takes the locks of the batch's users in one script. Messages of users whom another
// worker has in hand are deferred, not waited for; if Redis refuses, the batch goes on without locks.
func (b *Batcher) lockUsers(ctx context.Context,
	batch []*submission,
) (lease *lock.Lease, ready, deferred []*submission) {
	keys := make([]string, 0, len(batch))
	keyOf := make(map[string]string, len(batch))
	for _, s := range batch {
		if _, known := keyOf[s.Event.UserID]; !known {
			key := b.Keys.Lock(b.Partition, s.Event.UserID)
			keyOf[s.Event.UserID] = key
			keys = append(keys, key)
		}
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	lease, busy, err := b.Locker.TryEach(ctx, keys, lock.For(b.Lease))
	if err != nil {
		b.locking.Failed(err)
		return nil, batch, nil
	}
	b.locking.Over()
	if len(busy) == 0 {
		return lease, batch, nil
	}
	isBusy := make(map[string]bool, len(busy))
	for _, key := range busy {
		isBusy[key] = true
	}
	for _, s := range batch {
		if isBusy[keyOf[s.Event.UserID]] {
			deferred = append(deferred, s)
		} else {
			ready = append(ready, s)
		}
	}
	return lease, ready, deferred
}

// unlock runs when the batch's messages are resolved, that is with their acks. What it cannot
// release ends with its lease.
func (b *Batcher) unlock(ctx context.Context, lease *lock.Lease) {
	if lease == nil {
		return
	}
	switch err := lease.Release(ctx); {
	case errors.Is(err, lock.ErrLost):
		b.Logger.Debug("locks of a batch were gone before it ended", "lease", b.Lease, "error", err)
	case err != nil:
		b.locking.Failed(err)
	}
}

// Release gives back the units of all orders that come to nothing. It is false if they may not be back.
func (b *Batcher) Release(ctx context.Context, outcomes []ledger.Outcome) bool {
	var ended []reservation.Release
	var which []int
	for i, out := range outcomes {
		if ledger.NeedsRelease(out) {
			ended, which = append(ended, ledger.ReleaseOf(out)), append(which, i)
		}
	}
	if len(ended) == 0 {
		return true
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	results, err := b.Store.Release(ctx, ended)
	if err != nil {
		b.releasing.Failed(err)
		return false
	}
	b.releasing.Over()
	for at, i := range which {
		out := outcomes[i]
		if b.Rebuilder != nil && results[at] == reservation.Released && out.Fresh && out.Status == order.StatusRejected {
			b.Rebuilder.NoteRefused(out)
		}
	}
	return true
}
