// Package batch turns the messages of one partition into transactions.
//
// Batcher.Handle (delivery.go) queues the orders of a message and waits for their
// results. The batcher locks their users, has the ledger record the orders, releases
// the units of rejected orders, and resolves each message (batcher.go). Two batches may be in
// flight at a time (inflight.go). Orders of a sale that is blocked in Postgres are retried apart
// from the others.
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

	"github.com/google/uuid"

	"stampede/fulfillment/metrics"
	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/lock"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/stream"
	"stampede/upkeep/rebuild"
)

const (
	// lockLeaseMax bounds leases: when a worker was killed and restarts, the users of its own entries
	// stay locked until their leases end.
	lockLeaseMax = 3 * time.Second

	// The waits after a batch in which every message was deferred.
	deferDelay    = 20 * time.Millisecond
	deferDelayMax = time.Second
)

// LockLease is the lease of a batch's locks where entries are claimed after minIdle. It is at most
// minIdle, so that the users of a dead worker's entries are free when the entries are claimed.
func LockLease(minIdle time.Duration) time.Duration {
	return min(max(minIdle, lock.MinLease), lockLeaseMax)
}

// Config configures a Batcher. All fields but Rebuilder are required.
type Config struct {
	Ledger    *ledger.Ledger
	Store     *reservation.Store
	Draws     *draws.Store
	Locker    *lock.Locker
	Keys      reservation.Keys
	Partition int
	BatchMax  int // orders of one transaction
	// Lease is how long a batch may keep its users locked. A slower transaction continues without
	// the locks: they save double work, and correctness does not depend on them.
	Lease   time.Duration
	Logger  *slog.Logger
	Metrics *metrics.Worker
	// Rebuilder receives evidence that Redis lacks orders. It may be nil.
	Rebuilder *rebuild.Rebuilder
	// Tracer traces the orders of traced purchases. It may be nil.
	Tracer *tracing.Tracer
}

// Batcher makes batches of the messages that the Router passes one by one. Messages that arrive
// during a transaction form the next batch. A batch waits only for the rest of a page of entries.
//
// A second transaction starts during another one only for a full batch: its rows are written while
// the first one waits for the disk. Batches in flight have no user in common.
type Batcher struct {
	Config

	queue *submissions
	// draining is closed when the worker stops: batches in flight finish, or are left to the next
	// worker if they would have to wait for a server.
	draining  chan struct{}
	drainOnce sync.Once

	recording, locking, releasing *metrics.Trouble

	// recordMax bounds the orders of one transaction. It is below BatchMax for a while after a
	// transaction took too long.
	recordMax atomic.Int64
}

// New returns a Batcher. Run starts it.
func New(config Config) *Batcher {
	config.Logger = config.Logger.With("partition", config.Partition)
	b := &Batcher{Config: config, queue: newSubmissions(), draining: make(chan struct{})}
	b.recordMax.Store(int64(config.BatchMax))
	b.recording = b.trouble(metrics.StepRecord, "record orders in Postgres")
	b.locking = b.trouble(metrics.StepLock, "lock the users of a batch, continuing without")
	b.releasing = b.trouble(metrics.StepRelease, "release the units of rejected orders")
	return b
}

func (b *Batcher) trouble(step, doing string) *metrics.Trouble {
	return metrics.NewTrouble(b.Logger, b.Metrics, step, doing)
}

// Drain lets batches in flight finish, without waiting for servers that are away.
func (b *Batcher) Drain() { b.drainOnce.Do(func() { close(b.draining) }) }

// process handles a batch, except the messages that have to wait for a later one.
func (b *Batcher) process(ctx context.Context, f *inFlightBatch) {
	started := time.Now()
	ctx, traced := b.trace(ctx, f.batch)
	defer traced.end()
	defer func() {
		if p := recover(); p != nil {
			b.Logger.ErrorContext(ctx, "panic in a batch; its messages are delivered again", "orders", len(f.batch),
				"order_ids", orderIDs(f.batch), "panic", p, "stack", string(debug.Stack()))
			// All of them, deferred ones included: nothing else resolves them.
			for _, s := range f.batch {
				s.resolve(fmt.Errorf("%w: %v", ledger.ErrPanicked, p))
			}
			f.deferred, f.blocked = nil, nil
		}
	}()

	lease, ready, deferred := b.lockUsers(ctx, f.batch)
	defer b.unlock(ctx, lease)
	if f.deferred = deferred; len(ready) == 0 {
		return
	}
	events := inSaleOrder(ready)

	crashpoint.Hit(crashpoint.BeforePersist)
	outcomes := b.record(ctx, events, f.apart)
	b.observeDurable(events, outcomes)
	crashpoint.Hit(crashpoint.AfterCommit)
	if b.Rebuilder != nil {
		b.Rebuilder.Probes.Note(b.Partition, outcomes)
	}
	released := b.Release(ctx, outcomes)
	crashpoint.Hit(crashpoint.BeforeAck)

	for i, s := range ready {
		switch out := outcomes[i]; {
		case errors.Is(out.Err, ledger.ErrBlocked):
			f.blocked, f.why = append(f.blocked, s), out.Err
			s.span.Fail(out.Err)
		case ledger.NeedsRelease(out) && !released:
			// Its units are not released: a later batch finds the order recorded and retries.
			f.deferred = append(f.deferred, s)
		default:
			b.noteOutcome(s, out)
			b.Metrics.Count(out)
			s.resolve(out.Err)
		}
	}
	b.Metrics.BatchOrders.Observe(float64(len(ready)))
	b.Metrics.BatchSeconds.Observe(time.Since(started).Seconds())
}

// loggedMax bounds the ids in a line of the log.
const loggedMax = 10

// orderIDs returns the orders of a batch, or the first of them, for the log.
func orderIDs(batch []*submission) []uuid.UUID {
	ids := make([]uuid.UUID, 0, loggedMax)
	for _, s := range batch[:min(len(batch), loggedMax)] {
		ids = append(ids, s.event.OrderID)
	}
	return ids
}

// observeDurable measures how long the orders that have just been recorded were on their way.
func (b *Batcher) observeDurable(events []order.OrderReserved, outcomes []ledger.Outcome) {
	now := time.Now()
	for i, out := range outcomes {
		if out.Err == nil && out.Fresh {
			b.Metrics.Durable.Observe(max(0, now.Sub(events[i].ReservedAt)).Seconds()) // the clocks may differ
		}
	}
}

// inSaleOrder sorts the batch by sale and sequence, and returns its events.
func inSaleOrder(batch []*submission) []order.OrderReserved {
	slices.SortStableFunc(batch, func(x, y *submission) int { return ledger.BySaleAndSequence(x.event, y.event) })
	events := make([]order.OrderReserved, len(batch))
	for i, s := range batch {
		events[i] = s.event
		if s.span.On() { // others continue below it
			events[i].TraceParent = s.span.Parent()
		}
	}
	return events
}

// lockUsers takes the locks of the batch's users in one script. Messages of users locked by another
// worker are deferred. If Redis refuses, the batch goes on without locks.
func (b *Batcher) lockUsers(
	ctx context.Context, batch []*submission,
) (lease *lock.Lease, ready, deferred []*submission) {
	keys := make([]string, 0, len(batch))
	userKeys := make(map[string]string, len(batch))
	for _, s := range batch {
		if _, known := userKeys[s.event.UserID]; !known {
			key := b.Keys.Lock(b.Partition, s.event.UserID)
			userKeys[s.event.UserID] = key
			keys = append(keys, key)
		}
	}
	span := tracing.Current(ctx).Redis("lock_acquire.lua")
	defer span.End()
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	lease, busy, err := b.Locker.TryEach(ctx, keys, lock.For(b.Lease))
	if span.Fail(err); err != nil {
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
		if isBusy[userKeys[s.event.UserID]] {
			deferred = append(deferred, s)
		} else {
			ready = append(ready, s)
		}
	}
	return lease, ready, deferred
}

// unlock runs after the batch's messages are resolved. Locks that it cannot release end with their
// lease.
func (b *Batcher) unlock(ctx context.Context, lease *lock.Lease) {
	if lease == nil {
		return
	}
	span := tracing.Current(ctx).Redis("lock_release.lua")
	defer span.End()
	err := lease.Release(ctx)
	span.Fail(err)
	switch {
	case errors.Is(err, lock.ErrLost):
		b.Logger.Debug("locks of a batch expired before it ended", "lease", b.Lease, "error", err)
	case err != nil:
		b.locking.Failed(err)
	}
}

// Release releases the units of orders that ended. It returns false if any may not be released.
func (b *Batcher) Release(ctx context.Context, outcomes []ledger.Outcome) bool {
	var ended []reservation.Release
	var sales []uuid.UUID
	var which []int
	for i, out := range outcomes {
		if ledger.NeedsRelease(out) {
			ended, sales, which = append(ended, ledger.ReleaseOf(out)), append(sales, out.Event.SaleID), append(which, i)
		}
	}
	if len(ended) == 0 {
		return true
	}
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	span := tracing.Current(ctx).Redis("release.lua")
	results, err := b.Store.Release(ctx, ended)
	span.Fail(err)
	span.End()
	if err != nil {
		b.releasing.Failed(err)
		return false
	}
	if slices.Contains(results, reservation.ReleaseUnreached) { // the shard of another order was reached
		return false
	}
	if err := b.Draws.NoteDue(ctx, sales); err != nil {
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

// record returns the outcome of every event. A batch is retried while Postgres is away, and halved
// when one of its events is at fault, so that the good part commits. An event that was not recorded
// has Outcome.Err; ledger.ErrBlocked means that it is to be retried apart from other sales.
//
// A batch that waits too long for a lock is split by sale; one that takes too long is halved. If
// oneSale is set, all events are of one blocked sale, and a wait for a lock halves the batch as well.
func (b *Batcher) record(ctx context.Context, events []order.OrderReserved, oneSale bool) []ledger.Outcome {
	limit := int(b.recordMax.Load())
	r := ledger.BatchRecording{
		Ledger: b.Ledger, Try: b.try, SplitBlocked: true, OneSale: oneSale, Limit: limit,
	}
	outcomes := r.Record(ctx, events)
	switch {
	case r.Slow:
		b.recordMax.Store(int64(r.Limit))
		b.Logger.WarnContext(ctx, "recording orders took too long; fewer are recorded at a time", "orders", r.Limit,
			"before", limit)
	case limit < b.BatchMax:
		b.recordMax.Store(int64(min(2*limit, b.BatchMax)))
	}
	return outcomes
}

// epochTries bounds the immediate retries of a transaction whose epoch has ended. More than one
// rebuild during a batch is rare.
const epochTries = 3

// try retries a transaction after errors that no event causes. It returns ErrStopping when the worker
// stops; any other error is caused by one of the events, or says that they were blocked.
func (b *Batcher) try(ctx context.Context, t ledger.Transaction) ([]ledger.Outcome, error) {
	for tries := 1; ; tries++ {
		if b.recording.Lasts() && b.isDraining() {
			return nil, stream.ErrStopping
		}
		outcomes, err := ledger.Attempt(ctx, b.Logger, t)
		if err == nil || ledger.FaultOf(err) != ledger.Transient {
			b.recording.Over()
			return outcomes, err
		}
		if ledger.IsLocked(err) || ledger.IsTooSlow(err) {
			if b.isDraining() {
				return nil, stream.ErrStopping
			}
			return nil, err
		}
		if errors.Is(err, ledger.ErrEpochOver) && tries <= epochTries {
			continue // the next attempt reads the new epoch
		}
		if !retry.Pause(b.recording.Failed(err), b.draining) {
			return nil, stream.ErrStopping
		}
	}
}

func (b *Batcher) isDraining() bool {
	select {
	case <-b.draining:
		return true
	default:
		return false
	}
}

// tracedBatch holds the spans of a batch with traced orders: one for each of these, in the trace of its purchase, and
// one of the batch. The span of the batch is in the trace of the first order. It has links to the other orders, and
// they have links to it.
type tracedBatch struct {
	batch  tracing.Span
	orders []*submission
}

// trace starts the spans of a batch. It returns nil if no order is traced, as nearly always. The context has the
// span of the batch.
func (b *Batcher) trace(ctx context.Context, batch []*submission) (context.Context, *tracedBatch) {
	if b.Tracer == nil {
		return ctx, nil
	}
	var t *tracedBatch
	for _, s := range batch {
		span := b.Tracer.Continue(tracing.Consumer, "record order", s.event.TraceParent)
		if !span.On() {
			continue
		}
		span.Text("stampede.order_id", s.event.OrderID.String())
		span.Text("stampede.sale_id", s.event.SaleID.String())
		span.Text("messaging.system", "redis")
		span.Text("messaging.operation.name", "record")
		span.Text("messaging.operation.type", "process")
		span.Text("messaging.destination.name", b.Keys.Orders(b.Partition))
		span.Text("messaging.consumer.group.name", reservation.Group)
		if s.delivery != nil {
			span.Text("messaging.message.id", s.delivery.entry)
			b.noteWaits(s)
		}
		s.span = span
		if t == nil {
			t = &tracedBatch{}
		}
		t.orders = append(t.orders, s)
	}
	if t == nil {
		return ctx, nil
	}
	others := make([]string, len(t.orders)-1)
	for i, s := range t.orders[1:] {
		others[i] = s.span.Parent()
	}
	t.batch = t.orders[0].span.Start(tracing.Internal, "batch", others...)
	t.batch.Number("messaging.batch.message_count", int64(len(batch)))
	t.batch.Number("stampede.partition", int64(b.Partition))
	for _, s := range t.orders[1:] {
		s.span.Link(t.batch.Parent())
	}
	return t.batch.In(ctx), t
}

// noteWaits makes the spans of an order's way to this batch: in the stream, and in this worker.
func (b *Batcher) noteWaits(s *submission) {
	if s.waits.IsZero() {
		s.waits = s.delivery.arrived
		b.Tracer.Past("wait in stream", s.event.TraceParent, s.event.ReservedAt, s.waits)
	}
	b.Tracer.Past("wait for batch", s.event.TraceParent, s.waits, time.Now())
}

func (t *tracedBatch) end() {
	if t == nil {
		return
	}
	t.batch.End()
	for _, s := range t.orders {
		s.span.End()
		s.span, s.waits = tracing.Span{}, time.Now() // the order may be in a later batch
	}
}

// noteOutcome notes what became of an order. What is left then is the ack of its message.
func (b *Batcher) noteOutcome(s *submission, out ledger.Outcome) {
	if !s.span.On() {
		return
	}
	s.span.Fail(out.Err)
	if out.Err != nil || s.delivery == nil {
		return
	}
	s.span.Text("stampede.status", string(out.Status))
	if !out.Fresh {
		s.span.Text("stampede.repeat", "true")
	}
	ack := b.Tracer.Continue(tracing.Client, "ack", s.event.TraceParent)
	ack.Text("messaging.system", "redis")
	ack.Text("messaging.operation.name", "ack")
	ack.Text("messaging.operation.type", "settle")
	s.delivery.mu.Lock()
	defer s.delivery.mu.Unlock()
	s.delivery.acks = append(s.delivery.acks, ack)
}

// endAcks is called when Redis has the ack, or when it was given up.
func (d *delivery) endAcks(sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ack := range d.acks {
		if !sent {
			ack.Fail(stream.ErrStopping)
		}
		ack.End()
	}
}
