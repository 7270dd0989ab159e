package batch

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/metrics"
	"stampede/internal/retry"
	"stampede/reservation/order"
	"stampede/stream"
)

// batchesInFlightMax is 2: one batch writes its rows while the other one waits for the disk. More
// would wait for each other at the sale's row.
const batchesInFlightMax = 2

// inFlightBatch is a batch that is being recorded.
type inFlightBatch struct {
	batch []*submission
	users map[string]struct{}
	// apart is set if all messages are of one blocked sale.
	apart bool
	sale  uuid.UUID
	// deferred, set when the batch is done, wait for a later batch; blocked wait for their sale, and
	// why is one of their errors.
	deferred, blocked []*submission
	why               error
}

// Run processes messages until ctx is done. Messages that still wait then get ErrStopping.
func (b *Batcher) Run(ctx context.Context) error {
	defer func() {
		leave(b.queue.close())
		for _, t := range []*metrics.Trouble{b.recording, b.locking, b.releasing} {
			t.End()
		}
	}()
	defer context.AfterFunc(ctx, b.Drain)()
	d := b.newDispatch()
	defer d.finish()
	for {
		if !d.wait(ctx) {
			return nil
		}
		d.start(ctx)
	}
}

// dispatch is the state of Run: the batches in flight and the messages that wait.
type dispatch struct {
	*Batcher
	done     chan *inFlightBatch
	inFlight []*inFlightBatch
	// deferred messages wait for a batch, and are older than the queue. idle counts the last batches in
	// which all messages were deferred.
	deferred []*submission
	idle     int

	blockedSales
}

func (b *Batcher) newDispatch() *dispatch {
	return &dispatch{
		Batcher: b, done: make(chan *inFlightBatch, batchesInFlightMax+1),
		blockedSales: blockedSales{blocked: make(map[uuid.UUID]*blockedSale)},
	}
}

// wait returns when a batch may start, and false if ctx ended.
func (d *dispatch) wait(ctx context.Context) bool {
	for ctx.Err() == nil {
		want, atLatest := d.wanted()
		var later <-chan time.Time
		if atLatest > 0 {
			later = time.After(atLatest)
		}
		d.queue.signalAt(want)
		select {
		case <-ctx.Done():
		case f := <-d.done:
			d.complete(f)
		case <-d.blockedDue():
			d.startBlocked(ctx)
		case <-d.queue.full:
			return ctx.Err() == nil
		case <-later:
			return ctx.Err() == nil
		}
	}
	return false
}

// wanted returns how many queued messages start a batch, and after how long it starts with fewer; 0
// means never.
func (d *dispatch) wanted() (messages int, atLatest time.Duration) {
	messages = 1
	switch running := len(d.inFlight); {
	case running == batchesInFlightMax:
		return math.MaxInt, 0
	case running > 0 && len(d.deferred) >= d.BatchMax: // they may wait for a batch in flight
		return math.MaxInt, 0
	case running > 0:
		return d.BatchMax, 0
	case len(d.deferred) >= d.BatchMax:
		messages = math.MaxInt
	}
	if len(d.deferred) > 0 {
		atLatest = retry.Delay(d.idle+1, deferDelay, deferDelayMax)
	}
	return messages, atLatest
}

// complete removes a finished batch.
func (d *dispatch) complete(f *inFlightBatch) {
	if f == d.apart {
		d.apart, d.idle = nil, 0
	} else {
		d.inFlight = slices.DeleteFunc(d.inFlight, func(other *inFlightBatch) bool { return other == f })
	}
	if d.isDraining() {
		leave(f.deferred)
		leave(f.blocked)
		d.leaveAll()
		return
	}
	if f.apart {
		d.completeBlocked(f)
		return
	}
	d.block(f.blocked, f.why)
	d.deferred = append(d.deferred, f.deferred...)
	if len(f.deferred) == len(f.batch) {
		d.idle++
	} else {
		d.idle = 0
	}
}

// start starts a batch of deferred and queued messages, without users who are in a batch in flight.
func (d *dispatch) start(ctx context.Context) {
	d.queue.awaitPage(d.BatchMax - len(d.deferred))
	f := &inFlightBatch{users: make(map[string]struct{})}
	older := d.deferred
	d.deferred = nil
	d.add(f, older)
	d.add(f, d.queue.take(d.BatchMax-len(f.batch)))
	if len(f.batch) == 0 {
		d.idle++ // the users of all are in flight
		return
	}
	d.inFlight = append(d.inFlight, f)
	d.launch(ctx, f)
}

func (d *dispatch) launch(ctx context.Context, f *inFlightBatch) {
	go func() {
		d.process(ctx, f)
		d.done <- f
	}()
}

// add adds messages to a batch before it starts, and defers those that cannot be in it.
func (d *dispatch) add(f *inFlightBatch, messages []*submission) {
	for _, s := range messages {
		if b := d.blocked[s.event.SaleID]; b != nil {
			d.addBlocked(b, s)
			continue
		}
		if len(f.batch) == d.BatchMax || d.isInFlight(s.event.UserID) {
			d.deferred = append(d.deferred, s)
			continue
		}
		f.users[s.event.UserID] = struct{}{}
		f.batch = append(f.batch, s)
	}
}

func (d *dispatch) isInFlight(user string) bool {
	contains := func(f *inFlightBatch) bool {
		_, found := f.users[user]
		return found
	}
	return slices.ContainsFunc(d.inFlight, contains) || d.apart != nil && contains(d.apart)
}

// finish waits for the batches in flight, and leaves the rest to the next worker.
func (d *dispatch) finish() {
	for len(d.inFlight) > 0 || d.apart != nil {
		d.complete(<-d.done)
	}
	d.leaveAll()
}

// leaveAll leaves the waiting messages to the next worker.
func (d *dispatch) leaveAll() {
	leave(d.deferred)
	d.deferred = nil
	d.leaveBlocked()
}

// leave leaves messages to the next worker.
func leave(batch []*submission) {
	for _, s := range batch {
		s.resolve(stream.ErrStopping)
	}
}

// The waits between retries of a blocked sale.
const (
	blockedDelay    = 100 * time.Millisecond
	blockedDelayMax = time.Second
)

// blockedFactor bounds, in batches, the messages of blocked sales that wait here. It is half of
// what the subscriber holds of a stream, so that other sales have the other half. Further messages
// are deferred.
const blockedFactor = 2

// blockedMin is the least of that bound: the orders of two messages.
const blockedMin = 2 * order.MaxPerMessage

// blockedSales are sales whose orders cannot be recorded now: another session has locked the sale's
// row, or recording even one order takes too long. They are retried one sale at a time, while the
// batches of all other sales continue.
type blockedSales struct {
	blocked map[uuid.UUID]*blockedSale
	// apart is the batch of a blocked sale that is in flight, or nil.
	apart *inFlightBatch
	// waiting is the number of messages of all blocked sales that wait here.
	waiting int
}

type blockedSale struct {
	waiting []*submission
	tries   int
	since   time.Time
	retryAt time.Time
}

// block adds messages to their blocked sales.
func (d *dispatch) block(messages []*submission, why error) {
	for _, s := range messages {
		b := d.blocked[s.event.SaleID]
		if b == nil {
			b = &blockedSale{since: time.Now()}
			d.blocked[s.event.SaleID] = b
			d.Logger.Warn("orders of a sale are blocked; other sales continue", "sale", s.event.SaleID,
				"orders", len(messages), "order_ids", orderIDs(messages), "error", why)
			d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Inc()
			d.scheduleRetry(b)
		}
		d.addBlocked(b, s)
	}
}

// addBlocked adds a message to its blocked sale, or defers it if too many wait.
func (d *dispatch) addBlocked(b *blockedSale, s *submission) {
	if d.waiting >= max(blockedFactor*d.BatchMax, blockedMin) {
		s.resolve(stream.ErrDeferred)
		return
	}
	b.waiting = append(b.waiting, s)
	d.waiting++
}

// scheduleRetry schedules the next try of the sale.
func (d *dispatch) scheduleRetry(b *blockedSale) {
	b.tries++
	b.retryAt = time.Now().Add(retry.Delay(b.tries, blockedDelay, blockedDelayMax))
}

// blockedDue returns a channel that receives when the next retry of a blocked sale is due, if any.
func (d *dispatch) blockedDue() <-chan time.Time {
	if at, ok := d.nextBlocked(); ok {
		return time.After(time.Until(at))
	}
	return nil
}

// nextBlocked returns when the next retry is due; ok is false if no sale is blocked, or a retry is in
// flight.
func (d *dispatch) nextBlocked() (at time.Time, ok bool) {
	if d.apart != nil {
		return at, false
	}
	for _, b := range d.blocked {
		if !ok || b.retryAt.Before(at) {
			at, ok = b.retryAt, true
		}
	}
	return at, ok
}

// startBlocked starts a batch of the blocked sale that is due.
func (d *dispatch) startBlocked(ctx context.Context) {
	if d.isDraining() {
		d.leaveBlocked()
		return
	}
	at, _ := d.nextBlocked()
	for sale, b := range d.blocked {
		if b.retryAt.Equal(at) {
			d.startBlockedSale(ctx, sale, b)
			return
		}
	}
}

func (d *dispatch) startBlockedSale(ctx context.Context, sale uuid.UUID, b *blockedSale) {
	f := &inFlightBatch{apart: true, sale: sale, users: make(map[string]struct{})}
	var left []*submission
	for _, s := range b.waiting {
		if len(f.batch) == d.BatchMax || d.isInFlight(s.event.UserID) {
			left = append(left, s)
			continue
		}
		f.users[s.event.UserID] = struct{}{}
		f.batch = append(f.batch, s)
	}
	b.waiting = left
	d.waiting -= len(f.batch)
	if len(f.batch) == 0 {
		if len(left) == 0 {
			d.unblock(sale, b)
		} else {
			d.scheduleRetry(b) // the users of all are in flight
		}
		return
	}
	d.apart = f
	d.launch(ctx, f)
}

// completeBlocked handles the results of a try. Messages that are still blocked go to the end, so
// that one of them does not block the others of their sale.
func (d *dispatch) completeBlocked(f *inFlightBatch) {
	b := d.blocked[f.sale]
	if len(f.blocked) == 0 && len(f.deferred) < len(f.batch) {
		d.deferred = append(d.deferred, f.deferred...)
		d.unblock(f.sale, b)
		return
	}
	if len(f.blocked)+len(f.deferred) < len(f.batch) {
		b.tries = 0
	}
	for _, s := range append(f.deferred, f.blocked...) {
		d.addBlocked(b, s)
	}
	d.scheduleRetry(b)
}

// unblock moves the messages of a sale back to the messages of all other sales.
func (d *dispatch) unblock(sale uuid.UUID, b *blockedSale) {
	d.waiting -= len(b.waiting)
	d.deferred = append(b.waiting, d.deferred...) // they are older
	delete(d.blocked, sale)
	d.Logger.Info("orders of a sale are no longer blocked", "sale", sale, "after", time.Since(b.since))
	d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Dec()
}

// leaveBlocked leaves blocked messages to the next worker.
func (d *dispatch) leaveBlocked() {
	for sale, b := range d.blocked {
		leave(b.waiting)
		d.waiting -= len(b.waiting)
		delete(d.blocked, sale)
		d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Dec()
	}
}
