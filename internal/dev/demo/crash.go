package demo

import (
	"context"
	"errors"
	"syscall"
	"time"

	"stampede/internal/dev/crowd"
	"stampede/internal/figure"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/stream"
)

// crash holds the figures of the killed worker.
type crash struct {
	orphans   int64         // its pending orders
	takenOver time.Duration // from the kill until other workers had claimed all of them
}

// thawedFor is how long a worker that was frozen while it was not reading may go on before it is frozen again.
const thawedFor = 5 * time.Millisecond

var errTooShort = errors.New("the sale ended before a worker had pending orders: use more --stock or a longer --over")

// killWorker waits until part of the stock is sold, and then kills a worker that has pending orders, by SIGKILL.
func (d *demo) killWorker(ctx context.Context, buyers *crowd.Crowd) error {
	enough := int(killAt * float64(min(d.config.orders(), int64(d.config.Buyers))))
	for buyers.Progress().Accepted < enough {
		if d.soldOut(buyers) {
			return errTooShort
		}
		if !retry.Pause(time.Millisecond, ctx.Done()) {
			return context.Cause(ctx)
		}
	}
	victim := stream.First(d.stream(), workers) // it reads the stream
	worker := d.fleet.workers[victim]
	worker.expectEnd()
	over := func() bool { return d.soldOut(buyers) }
	err := await(ctx, "pending orders of "+victim, func() (bool, error) { return d.freezeWithOrders(ctx, worker, over) })
	if err != nil {
		return err
	}
	worker.Signal(syscall.SIGKILL)
	<-worker.Done()
	killed := time.Now()
	if d.crash.orphans, err = d.pendingOrders(ctx, victim); err != nil {
		return err
	}
	d.story.add("kill -9 of %s with %s pending orders", victim, figure.Count(d.crash.orphans))

	if !retry.Pause(replaceAfter, ctx.Done()) {
		return context.Cause(ctx)
	}
	env := d.env()
	if d.config.Dashboard { // which knows the address of the killed one
		env = append(env, "STAMPEDE_METRICS_ADDR="+worker.metrics)
	}
	if err := d.fleet.startWorker(ctx, "worker-3", env); err != nil {
		return err
	}
	err = await(ctx, "the claim of the orders of "+victim, func() (bool, error) {
		pending, err := d.pendingOrders(ctx, victim)
		return pending == 0, err
	})
	if err != nil {
		return err
	}
	d.crash.takenOver = time.Since(killed)
	d.story.add("other workers took over all of them within %.1f s; worker-3 is started as a replacement", d.crash.takenOver.Seconds())
	return nil
}

// freezeWithOrders freezes a worker and reports whether it has pending orders, which it cannot process while frozen.
// Redis delivers entries to a waiting reader even then. A worker that was frozen while it was not reading leaves the
// next entry unread, and is thawed. It returns errTooShort if there are no such orders and the sale is over.
func (d *demo) freezeWithOrders(ctx context.Context, worker *process, over func() bool) (bool, error) {
	worker.Signal(syscall.SIGSTOP)
	for {
		last := over()
		pending, err := d.pendingOrders(ctx, worker.name)
		if pending > 0 || err != nil {
			return true, err
		}
		backlog, err := stream.ReadBacklog(ctx, d.redis, d.stream(), reservation.Group)
		switch {
		case err != nil:
			return false, err
		case backlog.Lag > 0:
			worker.Signal(syscall.SIGCONT)
			retry.Pause(thawedFor, ctx.Done())
			return false, nil
		case last:
			return false, errTooShort
		}
		if !retry.Pause(time.Millisecond, ctx.Done()) {
			return false, context.Cause(ctx)
		}
	}
}

// soldOut reports whether the crowd gets no more orders.
func (d *demo) soldOut(buyers *crowd.Crowd) bool {
	select {
	case <-buyers.Done():
		return true
	default:
		return int64(buyers.Progress().Accepted) >= d.config.orders()
	}
}
