package fulfillment

import (
	"context"
	"time"

	"github.com/google/uuid"
)

// The waits between the tries of a sale that is held up.
const (
	heldDelay    = 100 * time.Millisecond
	heldDelayMax = time.Second
)

// heldFactor is how many batches of messages of sales that are held up wait here at most. It is half of what the
// subscriber holds of a stream, so that the other half is left to other sales. The rest is put off.
const heldFactor = 2

// heldSales are sales whose orders were held up: somebody else has the row of the sale, or it takes too long to record
// even one of its orders. They are tried apart, one sale at a time, beside the batches of all other sales.
type heldSales struct {
	held map[uuid.UUID]*heldSale
	// apart is the batch of a held sale that is under way, or nil.
	apart *flight
	// kept is how many messages wait in all of them.
	kept int
}

type heldSale struct {
	waiting []*submission
	tries   int
	since   time.Time
	again   time.Time // when it is tried next
}

// hold keeps messages apart whose sales were held up.
func (d *dispatch) hold(messages []*submission, why error) {
	for _, s := range messages {
		h := d.held[s.event.SaleID]
		if h == nil {
			h = &heldSale{since: time.Now()}
			d.held[s.event.SaleID] = h
			d.logger.Warn("orders of a sale are held up; other sales go on", "sale", s.event.SaleID, "error", why)
			d.metrics.failing.WithLabelValues(stepHeld).Inc()
			d.putBack(h)
		}
		d.keep(h, s)
	}
}

// keep has a message wait with its sale. If too many do, it is put off.
func (d *dispatch) keep(h *heldSale, s *submission) {
	if d.kept >= heldFactor*d.batchMax {
		s.resolve(errPutOff)
		return
	}
	h.waiting = append(h.waiting, s)
	d.kept++
}

// putBack sets when the sale is tried next.
func (d *dispatch) putBack(h *heldSale) {
	h.tries++
	h.again = time.Now().Add(retryDelay(h.tries, heldDelay, heldDelayMax))
}

// nextHeld is when the next try of a held sale is due; any is false if there is none, or one is under way.
func (d *dispatch) nextHeld() (at time.Time, any bool) {
	if d.apart != nil {
		return at, false
	}
	for _, h := range d.held {
		if !any || h.again.Before(at) {
			at, any = h.again, true
		}
	}
	return at, any
}

// startHeld tries the sale that is due, with as many orders as a batch takes.
func (d *dispatch) startHeld(ctx context.Context) {
	if d.isDraining() {
		d.leaveHeld()
		return
	}
	at, _ := d.nextHeld()
	for sale, h := range d.held {
		if h.again.Equal(at) {
			d.startApart(ctx, sale, h)
			return
		}
	}
}

func (d *dispatch) startApart(ctx context.Context, sale uuid.UUID, h *heldSale) {
	f := &flight{apart: true, sale: sale, users: make(map[string]struct{})}
	var left []*submission
	for _, s := range h.waiting {
		if len(f.batch) == d.batchMax || d.flying(s.event.UserID) {
			left = append(left, s)
			continue
		}
		f.users[s.event.UserID] = struct{}{}
		f.batch = append(f.batch, s)
	}
	h.waiting = left
	d.kept -= len(f.batch)
	if len(f.batch) == 0 {
		if len(left) == 0 {
			d.free(sale, h)
		} else {
			d.putBack(h) // all of them have users in hand
		}
		return
	}
	d.apart = f
	d.fly(ctx, f)
}

// overHeld notes what became of a try. Messages that are still held up go behind the others of their sale, so that one of
// them keeps the others from nothing.
func (d *dispatch) overHeld(f *flight) {
	h := d.held[f.sale]
	if len(f.heldUp) == 0 && len(f.deferred) < len(f.batch) {
		d.deferred = append(d.deferred, f.deferred...)
		d.free(f.sale, h)
		return
	}
	if len(f.heldUp)+len(f.deferred) < len(f.batch) {
		h.tries = 0
	}
	for _, s := range append(f.deferred, f.heldUp...) {
		d.keep(h, s)
	}
	d.putBack(h)
}

// free lets the orders of a sale go with those of others again.
func (d *dispatch) free(sale uuid.UUID, h *heldSale) {
	d.kept -= len(h.waiting)
	d.deferred = append(h.waiting, d.deferred...) // they are older
	delete(d.held, sale)
	d.logger.Info("orders of a sale are held up no longer", "sale", sale, "after", time.Since(h.since))
	d.metrics.failing.WithLabelValues(stepHeld).Dec()
}

// leaveHeld leaves what is held up to the next worker.
func (d *dispatch) leaveHeld() {
	for sale, h := range d.held {
		leave(h.waiting)
		d.kept -= len(h.waiting)
		delete(d.held, sale)
		d.metrics.failing.WithLabelValues(stepHeld).Dec()
	}
}
