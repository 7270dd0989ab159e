package fulfillment

import (
	"context"
	"fmt"
	"time"

	"stampede/internal/pause"
	"stampede/sql"
)

const (
	// dateInterval is how often workers look for orders without a deadline. Only older workers write such,
	// and they are replaced.
	dateInterval = 10 * time.Minute
	// dateRetry is how soon they look again if they could not.
	dateRetry = 10 * time.Second
)

// dateOrders gives orders that an older worker has confirmed the deadline of which it knew nothing: at once,
// and then now and then, until ctx ends.
func (w *Worker) dateOrders(ctx context.Context) {
	dating := newTrouble(w.config.Logger, w.metrics, "date", "give deadlines to orders that an older worker confirmed")
	for {
		dated, err := w.ledger.dateAll(ctx)
		if dated > 0 {
			w.config.Logger.Info("gave deadlines to orders that an older worker confirmed", "orders", dated)
		}
		if ctx.Err() != nil {
			return
		}
		dating.note(err)
		next := dateInterval
		if err != nil {
			next = dateRetry
		}
		if !pause.For(next, ctx.Done()) {
			return
		}
	}
}

// dateAll goes on until no such order is left that nobody else has in hand. It returns how many there were.
func (l *Ledger) dateAll(ctx context.Context) (dated int, err error) {
	for {
		limited, cancel := context.WithTimeout(ctx, recordTimeout)
		var n int
		err := l.pool.QueryRow(limited, sql.DateOrders, sweepMax).Scan(&n)
		cancel()
		if dated += n; err != nil {
			return dated, fmt.Errorf("date orders: %w", err)
		}
		if n < sweepMax {
			return dated, nil
		}
	}
}
