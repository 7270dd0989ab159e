package fulfillment

import (
	"context"
	"sync"

	"stampede/fulfillment/metrics"
	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation/order"
)

// sweepOrders expires unpaid orders and releases the units of ended ones until ctx is done. All
// workers do so, each on rows that no other has locked. Expiry continues while Redis is
// slow or away.
func (w *Worker) sweepOrders(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { w.expireOrders(ctx) })
	all.Go(func() { w.releaseUnits(ctx) })
	all.Wait()
}

// expireOrders ends overdue orders until ctx is done.
func (w *Worker) expireOrders(ctx context.Context) {
	e := ledger.NewExpirer(w.ledger, w.config.Logger)
	expiring := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepExpire,
		"expire orders that were not paid in time")
	for w.nextSweep(ctx) {
		expired, err := ledger.SweepSales(ctx, e.ExpireSome)
		if expired > 0 {
			w.metrics.Orders.WithLabelValues(string(order.StatusExpired)).Add(float64(expired))
			w.config.Logger.Info("expired orders that were not paid in time", "orders", expired)
		}
		w.metrics.OrdersAside.Set(float64(len(e.Aside)))
		if ctx.Err() != nil {
			return
		}
		expiring.Note(err)
	}
}

// nextSweep waits until the next sweep; it returns false if ctx has ended.
func (w *Worker) nextSweep(ctx context.Context) bool {
	return retry.Pause(retry.Delay(1, w.config.SweepInterval, w.config.SweepInterval), ctx.Done())
}
