package fulfillment

import (
	"context"
	"sync"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/metrics"
	"stampede/internal/pause"
	"stampede/internal/retry"
	"stampede/reservation/order"
)

// sweepOrders ends orders that nobody paid for in time, and has the units of those and of cancelled ones
// come back to Redis, until ctx ends. All workers do it, each with what the others do not have in hand.
// A Redis that is slow or away keeps no order from expiring.
func (w *Worker) sweepOrders(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { w.expireOrders(ctx) })
	all.Go(func() { w.releaseUnits(ctx) })
	all.Wait()
}

// expireOrders ends overdue orders until ctx ends.
func (w *Worker) expireOrders(ctx context.Context) {
	e := ledger.NewExpirer(w.ledger, w.config.Logger)
	expiring := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepExpire,
		"expire orders that were not paid in time")
	for w.nextSweep(ctx) {
		expired, err := ledger.SweepSales(ctx, e.Some)
		if expired > 0 {
			w.metrics.Orders.WithLabelValues(string(order.StatusExpired)).Add(float64(expired))
			w.config.Logger.Info("ended orders that were not paid in time", "orders", expired)
		}
		w.metrics.OrdersAside.Set(float64(len(e.Aside)))
		if ctx.Err() != nil {
			return
		}
		expiring.Note(err)
	}
}

// nextSweep waits until it is time to look again; false if ctx has ended.
func (w *Worker) nextSweep(ctx context.Context) bool {
	return pause.For(retry.RetryDelay(1, w.config.SweepInterval, w.config.SweepInterval), ctx.Done())
}
