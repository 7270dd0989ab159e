package fulfillment

import (
	"context"

	"stampede/fulfillment/metrics"
	"stampede/upkeep/retire"
)

// retireSales lets sales that are over leave Redis until ctx is done.
func (w *Worker) retireSales(ctx context.Context) {
	if w.config.RetireAfter == 0 {
		return
	}
	retirer := retire.New(retire.Config{
		Pool: w.config.Pool, Redis: w.config.Control, Keys: w.config.Keys, Store: w.config.Store, Catalog: w.config.Catalog,
		After: w.config.RetireAfter, Logger: w.config.Logger,
	})
	retiring := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRetire, "let ended sales leave Redis")
	for w.nextSweep(ctx) {
		retired, err := retirer.Sweep(ctx)
		w.metrics.Retired.Add(float64(retired))
		if ctx.Err() != nil {
			return
		}
		retiring.Note(err)
	}
}
