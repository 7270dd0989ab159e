package fulfillment

import (
	"context"
	"time"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/sql"
)

// monthsInterval is how often a worker makes sure that the tables of the next month exist.
const monthsInterval = time.Hour

// makeMonths creates the tables of the next month ahead, until ctx is done. A new sale creates the tables of its month
// if they are missing, but waits for other changes of these tables.
func (w *Worker) makeMonths(ctx context.Context) {
	making := retry.Outage{Log: w.config.Logger, Doing: "create the tables for orders of the next month"}
	for {
		limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
		_, err := w.config.Pool.Exec(limited, sql.WorkerMakeMonths)
		cancel()
		if ctx.Err() != nil {
			return
		}
		delay := monthsInterval
		if err != nil {
			delay = making.Failed(err)
		} else {
			making.Over()
		}
		if !retry.Pause(delay, ctx.Done()) {
			return
		}
	}
}
