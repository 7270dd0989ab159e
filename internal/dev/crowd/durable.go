package crowd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"stampede/internal/figure"
)

// Durable counts the accepted orders that reached Postgres, and how fast they did.
type Durable struct {
	Orders int
	// Rate is Orders divided by the time from the first acceptance to the arrival of the last order.
	Rate float64
	// LastAt is when the last of them was seen, within durablePoll.
	LastAt time.Time
}

func (d Durable) remark(r Report) string {
	if missing := r.Accepted - d.Orders; missing > 0 {
		return fmt.Sprintf("%s accepted orders have not arrived", figure.Count(missing))
	}
	if r.Accepted == 0 {
		return ""
	}
	return fmt.Sprintf("the last %d ms after the last acceptance", max(0, d.LastAt.Sub(r.LastAccepted).Milliseconds()))
}

// durablePoll is the interval between reads of Sold, and so the precision of LastAt.
const durablePoll = 10 * time.Millisecond

// WatchDurable runs beside Run. It returns when all accepted orders are stored, or when none has arrived for patience
// after the end of the crowd. Failed reads are retried.
func (c *Crowd) WatchDurable(ctx context.Context, verifier Verifier, patience time.Duration) (Durable, error) {
	tick := time.NewTicker(durablePoll)
	defer tick.Stop()
	var sold int64
	var lastErr error
	lastAt := time.Now()
	done := c.done
	ended := time.Time{}
	for {
		now, err := verifier.Sold(ctx)
		switch {
		case errors.Is(err, ErrPaymentWindow):
			return Durable{}, err
		case err != nil:
			lastErr = err
		case now != sold:
			sold, lastAt = now, time.Now()
		}
		if !ended.IsZero() {
			r := c.Report()
			all := sold >= int64(r.Accepted)*r.Quantity
			if all || time.Since(latest(lastAt, ended)) > patience {
				if !all && sold == 0 && lastErr != nil {
					return Durable{}, fmt.Errorf("watch the orders arrive: %w", lastErr)
				}
				orders := int(sold / r.Quantity)
				return Durable{Orders: orders, Rate: rate(orders, lastAt.Sub(r.FirstAccepted)), LastAt: lastAt}, nil
			}
		}
		select {
		case <-tick.C:
		case <-done:
			done, ended = nil, time.Now()
		case <-ctx.Done():
			return Durable{}, ctx.Err()
		}
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
