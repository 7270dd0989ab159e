package demo

import (
	"context"
	"syscall"
	"time"

	"stampede/internal/crowd"
	"stampede/internal/figure"
	"stampede/internal/pause"
)

// crash is what became of the worker that was killed.
type crash struct {
	orphans   int64         // orders that it had in its hands
	takenOver time.Duration // from its end until another worker had them all
}

const victim = "worker-1"

// killWorker waits until the sale is well under way, and then kills a worker that has orders in its
// hands. To be sure that it has some, it is halted first: Redis hands entries to a reader that waits,
// and one that is halted cannot give them back. The kill is a SIGKILL, as the kernel's own would be.
func (d *demo) killWorker(ctx context.Context, buyers *crowd.Crowd) error {
	enough := int(killAt * float64(min(d.config.Stock, int64(d.config.Buyers))))
	err := await(ctx, "the middle of the sale", func() (bool, error) { return buyers.Progress().Accepted >= enough, nil })
	if err != nil {
		return err
	}
	worker := d.fleet.workers[victim]
	worker.expectEnd()
	worker.Signal(syscall.SIGSTOP)
	err = await(ctx, "orders in the hands of "+victim, func() (bool, error) {
		pending, err := d.pendingOf(ctx, victim)
		return pending > 0, err
	})
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

	if !pause.For(replaceAfter, ctx.Done()) {
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
