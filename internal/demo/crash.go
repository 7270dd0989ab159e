package demo

import (
	"context"
	"syscall"
	"time"

	"stampede/fulfillment/stream"
	"stampede/internal/crowd"
	"stampede/internal/figure"
	"stampede/internal/retry"
)

// crash holds the figures of the killed worker.
type crash struct {
	orphans   int64         // its pending orders
	takenOver time.Duration // from the kill until other workers had claimed all of them
}

// A frozen worker that gets no pending orders within frozenFor is thawed for thawedFor and frozen again.
const (
	frozenFor = 200 * time.Millisecond
	thawedFor = 50 * time.Millisecond
)

// killWorker waits until part of the stock is sold, and then kills a worker that has pending orders, by SIGKILL.
func (d *demo) killWorker(ctx context.Context, buyers *crowd.Crowd) error {
	enough := int(killAt * float64(min(d.config.Stock, int64(d.config.Buyers))))
	err := await(ctx, "the middle of the sale", func() (bool, error) { return buyers.Progress().Accepted >= enough, nil })
	if err != nil {
		return err
	}
	victim := stream.First(d.stream(), workers) // it reads the stream
	worker := d.fleet.workers[victim]
	worker.expectEnd()
	err = await(ctx, "pending orders of "+victim, func() (bool, error) { return d.freezeWithOrders(ctx, worker) })
	if err != nil {
		return err
	}
	worker.Signal(syscall.SIGKILL)
	<-worker.Done()
	killed := time.Now()
	if d.crash.orphans, err = d.pendingOf(ctx, victim); err != nil {
		return err
	}
	d.story.add("kill -9 of %s with %s pending orders", victim, figure.Count(d.crash.orphans))

	if !retry.Pause(replaceAfter, ctx.Done()) {
		return context.Cause(ctx)
	}
	if _, err := d.fleet.startWorker(ctx, "worker-3", d.env()); err != nil {
		return err
	}
	err = await(ctx, "the claim of the orders of "+victim, func() (bool, error) {
		pending, err := d.pendingOf(ctx, victim)
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
// Redis delivers entries to a waiting reader even then. A worker that was frozen while it was not reading gets none and
// is thawed.
func (d *demo) freezeWithOrders(ctx context.Context, worker *process) (bool, error) {
	worker.Signal(syscall.SIGSTOP)
	for frozen := time.Now(); time.Since(frozen) < frozenFor; {
		pending, err := d.pendingOf(ctx, worker.name)
		if pending > 0 || err != nil {
			return true, err
		}
		retry.Pause(time.Millisecond, ctx.Done())
	}
	worker.Signal(syscall.SIGCONT)
	retry.Pause(thawedFor, ctx.Done())
	return false, nil
}
