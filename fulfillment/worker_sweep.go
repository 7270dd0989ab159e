package fulfillment

import (
	"context"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/sql"
	"stampede/upkeep/rebuild"
)

// awaitPostgres waits until Postgres answers, checks its schema, and returns how many partitions to
// serve: the partitions of new sales, and of sales created when there were more.
func (w *Worker) awaitPostgres(ctx context.Context) (partitions int, err error) {
	outage := retry.Outage{Log: w.config.Logger, Doing: "read the schema's version from Postgres"}
	for {
		partitions, err = w.checkPostgres(ctx)
		if err == nil || sql.IsUnfit(err) {
			outage.Over()
			return partitions, err
		}
		if ctx.Err() != nil || !retry.Pause(outage.Failed(err), ctx.Done()) {
			return 0, ctx.Err()
		}
	}
}

func (w *Worker) checkPostgres(ctx context.Context) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	if err := sql.Check(ctx, w.config.Pool); err != nil {
		return 0, err
	}
	return w.countPartitions(ctx)
}

// countPartitions returns the number of partitions of new and older sales.
func (w *Worker) countPartitions(ctx context.Context) (int, error) {
	return rebuild.CountPartitions(ctx, w.config.Pool, w.config.Keys)
}

// sweep publishes operators' changes that Redis does not have yet, until ctx is done. It also notices
// that sales have more partitions, which ingresses with a new setting cause.
func (w *Worker) sweep(ctx context.Context) {
	publishing := retry.Outage{Log: w.config.Logger, Doing: "publish changed sales to Redis"}
	counting := retry.Outage{Log: w.config.Logger, Doing: "read the number of partitions from Postgres"}
	for w.nextSweep(ctx) {
		published, publishErr := w.publishPending(ctx)
		partitions, countErr := w.countPartitions(ctx)
		if ctx.Err() != nil {
			return
		}
		w.postgresAway.Store(countErr != nil)
		publishing.Note(publishErr)
		counting.Note(countErr)
		if published > 0 {
			w.config.Logger.Info("published changed sales to Redis", "sales", published)
		}
		if before := int(w.partitions.Load()); countErr == nil && partitions > before {
			w.config.Logger.Info("sales have more partitions", "partitions", partitions, "before", before)
			counting.Note(w.setPartitions(partitions))
		}
	}
}

func (w *Worker) publishPending(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return w.config.Catalog.PublishPending(ctx)
}
