package batch

import (
	"context"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/metrics"
	"stampede/fulfillment/stream"
	"stampede/internal/retry"
)

// The waits between the tries of a blocked sale.
const (
	blockedDelay    = 100 * time.Millisecond
	blockedDelayMax = time.Second
)

// blockedFactor bounds, in batches, the messages of blocked sales that wait here. It is half of
// what the subscriber holds of a stream, so that other sales have the other half. The rest is
// deferred.
const blockedFactor = 2

// blockedSales are sales whose orders were blocked: another session has locked the sale's row, or
// recording even one order takes too long. They are retried alone, one sale at a time, while the
// batches of all other sales continue.
type blockedSales struct {
	blocked map[uuid.UUID]*blockedSale
	// apart is the batch of a blocked sale that is in flight, or nil.
	apart *inFlightBatch
	// kept is the number of messages that wait in all of them.
	kept int
}

type blockedSale struct {
	waiting []*submission
	tries   int
	since   time.Time
	again   time.Time // when it is tried next
}

// hold keeps messages of blocked sales apart.
func (d *dispatch) hold(messages []*submission, why error) {
	for _, s := range messages {
		h := d.blocked[s.Event.SaleID]
		if h == nil {
			h = &blockedSale{since: time.Now()}
			d.blocked[s.Event.SaleID] = h
			d.Logger.Warn("orders of a sale are blocked; other sales continue", "sale", s.Event.SaleID, "error", why)
			d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Inc()
			d.putBack(h)
		}
		d.keep(h, s)
	}
}

// keep has a message wait with its sale, or defers it if too many wait.
func (d *dispatch) keep(h *blockedSale, s *submission) {
	if d.kept >= blockedFactor*d.BatchMax {
		s.resolve(stream.ErrDeferred)
		return
	}
	h.waiting = append(h.waiting, s)
	d.kept++
}

// putBack schedules the next try of the sale.
func (d *dispatch) putBack(h *blockedSale) {
	h.tries++
	h.again = time.Now().Add(retry.Delay(h.tries, blockedDelay, blockedDelayMax))
}

// nextBlocked is when the next try of a blocked sale is due; any is false if there is none, or one
// is in flight.
func (d *dispatch) nextBlocked() (at time.Time, any bool) {
	if d.apart != nil {
		return at, false
	}
	for _, h := range d.blocked {
		if !any || h.again.Before(at) {
			at, any = h.again, true
		}
	}
	return at, any
}

// startBlocked tries the sale that is due, with a batch of its orders.
func (d *dispatch) startBlocked(ctx context.Context) {
	if d.isDraining() {
		d.leaveBlocked()
		return
	}
	at, _ := d.nextBlocked()
	for sale, h := range d.blocked {
		if h.again.Equal(at) {
			d.startApart(ctx, sale, h)
			return
		}
	}
}

func (d *dispatch) startApart(ctx context.Context, sale uuid.UUID, h *blockedSale) {
	f := &inFlightBatch{apart: true, sale: sale, users: make(map[string]struct{})}
	var left []*submission
	for _, s := range h.waiting {
		if len(f.Batch) == d.BatchMax || d.isInFlight(s.Event.UserID) {
			left = append(left, s)
			continue
		}
		f.users[s.Event.UserID] = struct{}{}
		f.Batch = append(f.Batch, s)
	}
	h.waiting = left
	d.kept -= len(f.Batch)
	if len(f.Batch) == 0 {
		if len(left) == 0 {
			d.free(sale, h)
		} else {
			d.putBack(h) // the users of all are in flight
		}
		return
	}
	d.apart = f
	d.launch(ctx, f)
}

// completeBlocked handles the results of a try. Messages that are still blocked go to the end, so
// that one of them does not block the others of their sale.
func (d *dispatch) completeBlocked(f *inFlightBatch) {
	h := d.blocked[f.sale]
	if len(f.blocked) == 0 && len(f.Deferred) < len(f.Batch) {
		d.Deferred = append(d.Deferred, f.Deferred...)
		d.free(f.sale, h)
		return
	}
	if len(f.blocked)+len(f.Deferred) < len(f.Batch) {
		h.tries = 0
	}
	for _, s := range append(f.Deferred, f.blocked...) {
		d.keep(h, s)
	}
	d.putBack(h)
}

// free lets the orders of a sale be recorded with those of others again.
func (d *dispatch) free(sale uuid.UUID, h *blockedSale) {
	d.kept -= len(h.waiting)
	d.Deferred = append(h.waiting, d.Deferred...) // they are older
	delete(d.blocked, sale)
	d.Logger.Info("orders of a sale are no longer blocked", "sale", sale, "after", time.Since(h.since))
	d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Dec()
}

// leaveBlocked leaves blocked messages to the next worker.
func (d *dispatch) leaveBlocked() {
	for sale, h := range d.blocked {
		leave(h.waiting)
		d.kept -= len(h.waiting)
		delete(d.blocked, sale)
		d.Metrics.Failing.WithLabelValues(metrics.StepBlocked).Dec()
	}
}
