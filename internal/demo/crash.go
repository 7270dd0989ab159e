package demo

import (
	"context"
	"syscall"
	"time"

	"stampede/internal/crowd"
	"stampede/internal/figure"
	"stampede/internal/retry"
)

// crash is what became of the worker that was killed.
type crash struct {
	orphans   int64         // orders that it had in its hands
	takenOver time.Duration // from its end until another worker had them all
}

const victim = "worker-1"

// A worker that is halted goes on if nothing comes into its hands for haltedFor, and is halted again after goesOnFor.
const (
	haltedFor = 200 * time.Millisecond
	goesOnFor = 50 * time.Millisecond
)

// killWorker waits until the sale is well under way, and then kills a worker that has orders in its
// hands. The kill is a SIGKILL, as the kernel's own would be.
func (d *demo) killWorker(ctx context.Context, buyers *crowd.Crowd) error {
	enough := int(killAt * float64(min(d.config.Stock, int64(d.config.Buyers))))
	err := await(ctx, "the middle of the sale", func() (bool, error) { return buyers.Progress().Accepted >= enough, nil })
	if err != nil {
		return err
	}
	worker := d.fleet.workers[victim]
	worker.expectEnd()
	err = await(ctx, "orders in the hands of "+victim, func() (bool, error) { return d.haltWithOrders(ctx, worker) })
	if err != nil {
		return err
	}
	worker.Signal(syscall.SIGKILL)
	<-worker.Done()
	killed := time.Now()
	if d.crash.orphans, err = d.pendingOf(ctx, victim); err != nil {
		return err
	}
	d.story.tell("kill -9 of %s, with %s orders in its hands", victim, figure.Count(d.crash.orphans))

	if !retry.Pause(replaceAfter, ctx.Done()) {
		return context.Cause(ctx)
	}
	if err := d.fleet.startWorker("worker-3", d.env()); err != nil {
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
	d.story.tell("all of them taken over by others after %.1f s; worker-3 is there instead", d.crash.takenOver.Seconds())
	return nil
}

// haltWithOrders halts a worker and tells whether it has orders in its hands, which it cannot give
// back then. Redis hands entries to a reader that waits, but a worker may be halted while it does
// not, on a busy machine even for most of the time: that one goes on.
func (d *demo) haltWithOrders(ctx context.Context, worker *process) (bool, error) {
	worker.Signal(syscall.SIGSTOP)
	for halted := time.Now(); time.Since(halted) < haltedFor; {
		pending, err := d.pendingOf(ctx, victim)
		if pending > 0 || err != nil {
			return true, err
		}
		retry.Pause(time.Millisecond, ctx.Done())
	}
	worker.Signal(syscall.SIGCONT)
	retry.Pause(goesOnFor, ctx.Done())
	return false, nil
}
