package batch

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/stream"
	"stampede/internal/retry"
)

// batchesInFlightMax is how many batches are under way at most: one writes its rows while the other
// one waits for the disk. More would wait for each other at the row of the sale.
const batchesInFlightMax = 2

// inFlightBatch is a batch that is being recorded.
type inFlightBatch struct {
	Batch []*submission
	users map[string]struct{}
	// apart is set if it is all of the sale, which was blocked.
	apart bool
	sale  uuid.UUID
	// Deferred are those that have to wait for a later batch, when the batch is done, and blocked those that have to wait
	// apart from other sales, for which why is a reason.
	Deferred, blocked []*submission
	why               error
}

// Run works until ctx ends. Messages that are still waiting then get ErrStopping.
func (b *Batcher) Run(ctx context.Context) error {
	defer func() { leave(b.Queue.close()) }()
	defer context.AfterFunc(ctx, b.Drain)()
	d := b.NewDispatch()
	defer d.finish()
	for {
		if !d.wait(ctx) {
			return nil
		}
		d.start(ctx)
	}
}

// dispatch is what Run knows: which batches are under way, and who waits.
type dispatch struct {
	*Batcher
	done     chan *inFlightBatch
	inFlight []*inFlightBatch
	// Deferred wait for a batch, and are older than what is in the queue; idle counts the batches in a row of which
	// all were deferred.
	Deferred []*submission
	idle     int
	Pace     pace

	blockedSales
}

func (b *Batcher) NewDispatch() *dispatch {
	return &dispatch{
		Batcher: b, done: make(chan *inFlightBatch, batchesInFlightMax+1),
		blockedSales: blockedSales{blocked: make(map[uuid.UUID]*blockedSale)},
	}
}

// wait returns when a batch may start, and false if ctx ended.
func (d *dispatch) wait(ctx context.Context) bool {
	for {
		want, atLatest := d.Wanted()
		var later <-chan time.Time
		stop := func() bool { return true }
		if atLatest > 0 {
			timer := time.NewTimer(atLatest)
			later, stop = timer.C, timer.Stop
		}
		var blocked <-chan time.Time
		stopBlocked := func() bool { return true }
		if tryBlocked, any := d.nextBlocked(); any {
			timer := time.NewTimer(time.Until(tryBlocked))
			blocked, stopBlocked = timer.C, timer.Stop
		}
		d.Queue.await(want)
		start := false
		select {
		case <-ctx.Done():
		case f := <-d.done:
			d.complete(f)
		case <-d.Queue.full:
			start = true
		case <-later:
			start = true
		case <-blocked:
			d.startBlocked(ctx)
		}
		stop()
		stopBlocked()
		switch {
		case ctx.Err() != nil:
			return false
		case start:
			return true
		}
	}
}

// Wanted is how many messages have to wait in the queue for a batch to start, and after how long it may start without
// them, or 0.
func (d *dispatch) Wanted() (messages int, atLatest time.Duration) {
	messages = 1
	switch running := len(d.inFlight); {
	case running == batchesInFlightMax:
		return math.MaxInt, 0
	case running > 0 && len(d.Deferred) >= d.BatchMax: // they may be waiting for what is under way
		return math.MaxInt, 0
	case running > 0:
		return d.BatchMax, 0
	case len(d.Deferred) >= d.BatchMax:
		messages = math.MaxInt
	}
	var linger time.Duration
	if !d.isDraining() {
		linger = max(d.Pace.Wait(time.Now()), 0)
	}
	if linger > 0 {
		messages = max(messages, d.BatchMax)
	}
	if len(d.Deferred) > 0 {
		return messages, max(linger, retry.RetryDelay(d.idle+1, deferDelay, deferDelayMax))
	}
	return messages, linger
}

// complete removes a batch that is done.
func (d *dispatch) complete(f *inFlightBatch) {
	if f == d.apart {
		d.apart, d.idle = nil, 0
	} else {
		d.inFlight = slices.DeleteFunc(d.inFlight, func(other *inFlightBatch) bool { return other == f })
		d.Pace.End(time.Now())
	}
	if d.isDraining() {
		leave(f.Deferred)
		leave(f.blocked)
		d.leaveAll()
		return
	}
	if f.apart {
		d.completeBlocked(f)
		return
	}
	d.hold(f.blocked, f.why)
	d.Deferred = append(d.Deferred, f.Deferred...)
	if len(f.Deferred) == len(f.Batch) {
		d.idle++
	} else {
		d.idle = 0
	}
}

// start starts a batch of what was deferred and of what waits, without users who are in a batch under way.
func (d *dispatch) start(ctx context.Context) {
	f := &inFlightBatch{users: make(map[string]struct{})}
	older := d.Deferred
	d.Deferred = nil
	d.add(f, older)
	d.add(f, read(d.Queue.take(d.BatchMax-len(f.Batch))))
	if len(f.Batch) == 0 {
		d.idle++ // the users of all are in flight
		return
	}
	d.Pace.Start(len(f.Batch), time.Now())
	d.inFlight = append(d.inFlight, f)
	d.launch(ctx, f)
}

func (d *dispatch) launch(ctx context.Context, f *inFlightBatch) {
	go func() {
		d.Process(ctx, f)
		d.done <- f
	}()
}

// add adds messages to a batch that is about to start, and defers those that cannot be in it.
func (d *dispatch) add(f *inFlightBatch, messages []*submission) {
	for _, s := range messages {
		if h := d.blocked[s.Event.SaleID]; h != nil {
			d.keep(h, s)
			continue
		}
		if len(f.Batch) == d.BatchMax || d.isInFlight(s.Event.UserID) {
			d.Deferred = append(d.Deferred, s)
			continue
		}
		f.users[s.Event.UserID] = struct{}{}
		f.Batch = append(f.Batch, s)
	}
}

func (d *dispatch) isInFlight(user string) bool {
	in := func(f *inFlightBatch) bool {
		_, is := f.users[user]
		return is
	}
	return slices.ContainsFunc(d.inFlight, in) || d.apart != nil && in(d.apart)
}

// finish waits for the end of what is under way, and leaves the rest to the next worker.
func (d *dispatch) finish() {
	for len(d.inFlight) > 0 || d.apart != nil {
		d.complete(<-d.done)
	}
	d.leaveAll()
}

// leaveAll leaves what waits for a batch to the next worker.
func (d *dispatch) leaveAll() {
	leave(d.Deferred)
	d.Deferred = nil
	d.leaveBlocked()
}

// leave leaves messages to the next worker.
func leave(batch []*submission) {
	for _, s := range batch {
		s.resolve(stream.ErrStopping)
	}
}
