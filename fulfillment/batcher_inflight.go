package fulfillment

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
)

// batchesInFlightMax is how many batches are under way at most: one writes its rows while the other one waits for the disk. More
// would wait for each other at the row of the sale.
const batchesInFlightMax = 2

// inFlightBatch is a batch that is being recorded.
type inFlightBatch struct {
	batch []*submission
	users map[string]struct{}
	// apart is set if it is all of the sale, which was blocked.
	apart bool
	sale  uuid.UUID
	// deferred are those that have to wait for a later batch, when the batch is done, and blocked those that have to wait
	// apart from other sales, for which why is a reason.
	deferred, blocked []*submission
	why               error
}

// Run works until ctx ends. Messages that are still waiting then get ErrStopping.
func (b *batcher) Run(ctx context.Context) error {
	defer func() { leave(b.queue.close()) }()
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

// dispatch is what Run knows: which batches are under way, and who waits.
type dispatch struct {
	*batcher
	done     chan *inFlightBatch
	inFlight []*inFlightBatch
	// deferred wait for a batch, and are older than what is in the queue; idle counts the batches in a row of which
	// all were deferred.
	deferred []*submission
	idle     int
	pace     pace

	blockedSales
}

func (b *batcher) newDispatch() *dispatch {
	return &dispatch{
		batcher: b, done: make(chan *inFlightBatch, batchesInFlightMax+1),
		blockedSales: blockedSales{blocked: make(map[uuid.UUID]*blockedSale)},
	}
}

// wait returns when a batch may start, and false if ctx ended.
func (d *dispatch) wait(ctx context.Context) bool {
	for {
		want, atLatest := d.wanted()
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
		d.queue.await(want)
		start := false
		select {
		case <-ctx.Done():
		case f := <-d.done:
			d.complete(f)
		case <-d.queue.full:
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

// wanted is how many messages have to wait in the queue for a batch to start, and after how long it may start without
// them, or 0.
func (d *dispatch) wanted() (messages int, atLatest time.Duration) {
	messages = 1
	switch running := len(d.inFlight); {
	case running == batchesInFlightMax:
		return math.MaxInt, 0
	case running > 0 && len(d.deferred) >= d.batchMax: // they may be waiting for what is under way
		return math.MaxInt, 0
	case running > 0:
		return d.batchMax, 0
	case len(d.deferred) >= d.batchMax:
		messages = math.MaxInt
	}
	var linger time.Duration
	if !d.isDraining() {
		linger = max(d.pace.wait(time.Now()), 0)
	}
	if linger > 0 {
		messages = max(messages, d.batchMax)
	}
	if len(d.deferred) > 0 {
		return messages, max(linger, retryDelay(d.idle+1, deferDelay, deferDelayMax))
	}
	return messages, linger
}

// complete removes a batch that is done.
func (d *dispatch) complete(f *inFlightBatch) {
	if f == d.apart {
		d.apart, d.idle = nil, 0
	} else {
		d.inFlight = slices.DeleteFunc(d.inFlight, func(other *inFlightBatch) bool { return other == f })
		d.pace.end(time.Now())
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
	d.hold(f.blocked, f.why)
	d.deferred = append(d.deferred, f.deferred...)
	if len(f.deferred) == len(f.batch) {
		d.idle++
	} else {
		d.idle = 0
	}
}

// start starts a batch of what was deferred and of what waits, without users who are in a batch under way.
func (d *dispatch) start(ctx context.Context) {
	f := &inFlightBatch{users: make(map[string]struct{})}
	older := d.deferred
	d.deferred = nil
	d.add(f, older)
	d.add(f, read(d.queue.take(d.batchMax-len(f.batch))))
	if len(f.batch) == 0 {
		d.idle++ // the users of all are in flight
		return
	}
	d.pace.start(len(f.batch), time.Now())
	d.inFlight = append(d.inFlight, f)
	d.launch(ctx, f)
}

func (d *dispatch) launch(ctx context.Context, f *inFlightBatch) {
	go func() {
		d.process(ctx, f)
		d.done <- f
	}()
}

// add adds messages to a batch that is about to start, and defers those that cannot be in it.
func (d *dispatch) add(f *inFlightBatch, messages []*submission) {
	for _, s := range messages {
		if h := d.blocked[s.event.SaleID]; h != nil {
			d.keep(h, s)
			continue
		}
		if len(f.batch) == d.batchMax || d.isInFlight(s.event.UserID) {
			d.deferred = append(d.deferred, s)
			continue
		}
		f.users[s.event.UserID] = struct{}{}
		f.batch = append(f.batch, s)
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
	leave(d.deferred)
	d.deferred = nil
	d.leaveBlocked()
}

// leave leaves messages to the next worker.
func leave(batch []*submission) {
	for _, s := range batch {
		s.resolve(ErrStopping)
	}
}
