package fulfillment

import (
	"context"
	"errors"

	"stampede/fulfillment/metrics"
	"stampede/ledger"
)

// releaseUnits releases the units of ended orders in Redis until ctx is done.
func (w *Worker) releaseUnits(ctx context.Context) {
	releasing := metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepRelease, "release the units of ended orders")
	for w.nextSweep(ctx) {
		released, err := w.ledger.SweepReleases(ctx, w.config.Store)
		if released > 0 {
			w.config.Logger.Info("released the units of ended orders", "orders", released)
		}
		pending, refused := w.ledger.PendingReleases(ctx)
		if ctx.Err() != nil {
			return
		}
		if refused == nil || errors.Is(refused, ledger.ErrRefused) {
			w.metrics.Releases.Set(float64(pending))
		}
		releasing.Note(errors.Join(err, refused))
	}
}
