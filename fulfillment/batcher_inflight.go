package fulfillment

import (
	"context"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
)

// flightsMax is how many batches are under way at most: one writes its rows while the other one waits for the disk. More
// would wait for each other at the row of the sale.
const flightsMax = 2

// flight is a batch under way.
type flight struct {
	batch []*submission
	users map[string]struct{}
	// apart is set if it is all of the sale, which was held up.
	apart bool
	sale  uuid.UUID
	// deferred are those that have to wait for a later batch, when the flight is over, and heldUp those that have to wait
	// apart from other sales, for which why is a reason.
	deferred, heldUp []*submission
	why              error
}

// Run works until ctx ends. Messages that are still waiting then get ErrStopping.
func (b *batcher) Run(ctx context.Context) error {
	defer func() { leave(b.queue.close()) }()
	defer context.AfterFunc(ctx, b.Drain)()
	d := &dispatch{batcher: b, landed: make(chan *flight, flightsMax+1), heldSales: heldSales{held: make(map[uuid.UUID]*heldSale)}}
	defer d.land()
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
	landed  chan *flight
	flights []*flight
	// deferred wait for a batch, and are older than what is in the queue; idle counts the batches in a row of which
	// all were deferred.
	deferred []*submission
	idle     int
	pace     pace

	heldSales
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
		var held <-chan time.Time
		stopHeld := func() bool { return true }
		if tryHeld, any := d.nextHeld(); any {
			timer := time.NewTimer(time.Until(tryHeld))
			held, stopHeld = timer.C, timer.Stop
		}
		d.queue.await(want)
		start := false
		select {
		case <-ctx.Done():
		case f := <-d.landed:
			d.over(f)
		case <-d.queue.full:
			start = true
		case <-later:
			start = true
		case <-held:
			d.startHeld(ctx)
		}
		stop()
		stopHeld()
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
	switch flying := len(d.flights); {
	case flying == flightsMax:
		return math.MaxInt, 0
	case flying > 0 && len(d.deferred) >= d.batchMax: // they may be waiting for what is under way
		return math.MaxInt, 0
	case flying > 0:
		return d.batchMax, 0
	case len(d.deferred) >= d.batchMax:
		messages = math.MaxInt
	}
	var gather time.Duration
	if !d.isDraining() {
		gather = max(d.pace.wait(time.Now()), 0)
	}
	if gather > 0 {
		messages = max(messages, d.batchMax)
	}
	if len(d.deferred) > 0 {
		return messages, max(gather, retryDelay(d.idle+1, deferDelay, deferDelayMax))
	}
	return messages, gather
}

// over takes a flight that is over off the list.
func (d *dispatch) over(f *flight) {
	if f == d.apart {
		d.apart, d.idle = nil, 0
	} else {
		d.flights = slices.DeleteFunc(d.flights, func(other *flight) bool { return other == f })
		d.pace.land(time.Now())
	}
	if d.isDraining() {
		leave(f.deferred)
		leave(f.heldUp)
		d.leaveAll()
		return
	}
	if f.apart {
		d.overHeld(f)
		return
	}
	d.hold(f.heldUp, f.why)
	d.deferred = append(d.deferred, f.deferred...)
	if len(f.deferred) == len(f.batch) {
		d.idle++
	} else {
		d.idle = 0
	}
}

// start starts a batch of what was deferred and of what waits, without users who are in a batch under way.
func (d *dispatch) start(ctx context.Context) {
	f := &flight{users: make(map[string]struct{})}
	older := d.deferred
	d.deferred = nil
	d.board(f, older)
	d.board(f, read(d.queue.take(d.batchMax-len(f.batch))))
	if len(f.batch) == 0 {
		d.idle++ // the users of all are in hand
		return
	}
	d.pace.start(len(f.batch), time.Now())
	d.flights = append(d.flights, f)
	d.fly(ctx, f)
}

func (d *dispatch) fly(ctx context.Context, f *flight) {
	go func() {
		d.process(ctx, f)
		d.landed <- f
	}()
}

// board adds messages to a batch that is about to start, and defers those that cannot be in it.
func (d *dispatch) board(f *flight, messages []*submission) {
	for _, s := range messages {
		if h := d.held[s.event.SaleID]; h != nil {
			d.keep(h, s)
			continue
		}
		if len(f.batch) == d.batchMax || d.flying(s.event.UserID) {
			d.deferred = append(d.deferred, s)
			continue
		}
		f.users[s.event.UserID] = struct{}{}
		f.batch = append(f.batch, s)
	}
}

func (d *dispatch) flying(user string) bool {
	in := func(f *flight) bool {
		_, is := f.users[user]
		return is
	}
	return slices.ContainsFunc(d.flights, in) || d.apart != nil && in(d.apart)
}

// land waits for the end of what is under way, and leaves the rest to the next worker.
func (d *dispatch) land() {
	for len(d.flights) > 0 || d.apart != nil {
		d.over(<-d.landed)
	}
	d.leaveAll()
}

// leaveAll leaves what waits for a batch to the next worker.
func (d *dispatch) leaveAll() {
	leave(d.deferred)
	d.deferred = nil
	d.leaveHeld()
}

// leave leaves messages to the next worker.
func leave(batch []*submission) {
	for _, s := range batch {
		s.resolve(ErrStopping)
	}
}
