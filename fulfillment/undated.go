package fulfillment

import (
	"context"
	"fmt"
	"time"

	"stampede/internal/pause"
	"stampede/sql"
)

// dateInterval is how often workers look for orders without a deadline, which nobody can pay for. Only older
// workers write such, so there are hardly ever any, and an index has no others.
const dateInterval = 5 * time.Second

// dateOrders gives orders that an older worker has confirmed the deadline of which it knew nothing: at once,
// and then now and then, until ctx ends.
func (w *Worker) dateOrders(ctx context.Context) {
	dating := newTrouble(w.config.Logger, w.metrics, stepDate, "give deadlines to orders that an older worker confirmed")
	for {
		dated, err := w.ledger.dateAll(ctx)
		if dated > 0 {
			w.config.Logger.Info("gave deadlines to orders that an older worker confirmed", "orders", dated)
		}
		if ctx.Err() != nil {
			return
		}
		dating.note(err)
		if !pause.For(dateInterval, ctx.Done()) {
			return
		}
	}
}

// dateAll goes on until no such order is left that nobody else has in hand. It returns how many there were.
func (l *Ledger) dateAll(ctx context.Context) (dated int, err error) {
	for {
		limited, cancel := context.WithTimeout(ctx, recordTimeout)
		var n int
		err := l.pool.QueryRow(limited, sql.LedgerDateOrders, sweepMax).Scan(&n)
		cancel()
		if dated += n; err != nil {
			return dated, fmt.Errorf("date orders: %w", err)
		}
		if n < sweepMax {
			return dated, nil
		}
	}
}
