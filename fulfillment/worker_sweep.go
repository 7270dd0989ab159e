package fulfillment

import (
	"context"
	"errors"

	"stampede/fulfillment/ledger"
	"stampede/fulfillment/rebuild"
	"stampede/internal/retry"
	"stampede/sql"
)

// awaitPostgres waits until Postgres answers, checks its schema, and returns how many partitions to
// serve: those of new sales, and those of sales created when there were more.
func (w *Worker) awaitPostgres(ctx context.Context) (partitions int, err error) {
	outage := retry.Outage{Log: w.config.Logger, Doing: "read the schema's version from Postgres"}
	for {
		partitions, err = w.askPostgres(ctx)
		if err == nil || errors.Is(err, sql.ErrNotMigrated) || errors.Is(err, sql.ErrSchemaAhead) {
			outage.Over()
			return partitions, err
		}
		if ctx.Err() != nil || !retry.Pause(outage.Failed(err), ctx.Done()) {
			return 0, ctx.Err()
		}
	}
}

func (w *Worker) askPostgres(ctx context.Context) (partitions int, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	if err := sql.Check(ctx, w.config.Pool); err != nil {
		return 0, err
	}
	return w.mostPartitions(ctx)
}

// mostPartitions asks Postgres for the most partitions that any sale, old or new, needs.
func (w *Worker) mostPartitions(ctx context.Context) (int, error) {
	return rebuild.MostPartitions(ctx, w.config.Pool, w.config.Keys)
}

// sweep publishes operators' changes that Redis does not have yet, until ctx ends or sales have
// more partitions than are served, which ingresses with a new setting cause. It returns their
// number.
func (w *Worker) sweep(ctx context.Context, served int) (partitions int) {
	publishing := retry.Outage{Log: w.config.Logger, Doing: "publish changed sales to Redis"}
	asking := retry.Outage{Log: w.config.Logger, Doing: "read the partitions of sales from Postgres"}
	for retry.Pause(retry.Delay(1, w.config.SweepInterval, w.config.SweepInterval), ctx.Done()) {
		published, publishErr := w.publishPending(ctx)
		partitions, askErr := w.mostPartitions(ctx)
		if ctx.Err() != nil {
			break
		}
		publishing.Note(publishErr)
		asking.Note(askErr)
		if published > 0 {
			w.config.Logger.Info("published changed sales to Redis", "sales", published)
		}
		if askErr == nil && partitions > served {
			return partitions
		}
	}
	return served
}

func (w *Worker) publishPending(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	return w.config.Catalog.PublishPending(ctx)
}
