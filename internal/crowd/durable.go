package crowd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"stampede/internal/figure"
)

// Durable tells when the accepted orders had reached Postgres.
type Durable struct {
	Orders int
	// Rate is Orders by the time from the first acceptance to the last order's arrival.
	Rate float64
	// LastAt is when the last of them was seen, to the precision of durablePoll.
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

// durablePoll is how often the books are asked, and so the precision of the figure.
const durablePoll = 10 * time.Millisecond

// Books know how many units of the sale are sold, and which orders hold them.
type Books interface {
	// Sold is how many units were confirmed since the books were opened.
	Sold(ctx context.Context) (int64, error)
	// Compare holds the ledger of a finished crowd against the books, order by order.
	Compare(ctx context.Context, l *Ledger) (Comparison, error)
}

// WatchDurable runs beside Run. It watches the books fill, and returns when all accepted orders are
// in them, or when after the crowd's end none has arrived for patience. Books that cannot be read
// for a moment are asked again.
func (c *Crowd) WatchDurable(ctx context.Context, books Books, patience time.Duration) (Durable, error) {
	tick := time.NewTicker(durablePoll)
	defer tick.Stop()
	var sold int64
	var lastErr error
	lastAt := time.Now()
	done := c.done
	ended := time.Time{}
	for {
		now, err := books.Sold(ctx)
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

// Comparison is what holding a ledger against the books came to.
type Comparison struct {
	// Accepted is how many orders the ledger knows; Found of them are live in the books, with the same buyer and
	// quantity. The others came to another end that their buyers are told of: refused after the 202, voided because
	// Redis lost them, cancelled, or expired.
	Accepted, Found, Refused, Voided, Cancelled, Expired int
	// Broken promises: accepted orders that the books lack, or hold for somebody else or in another
	// quantity; live orders of which the crowd knows nothing; answers that contradict each other.
	Missing, Altered, Strangers, Contradictions int
	// Recovered is how many live orders belong to buyers who never got their answer.
	Recovered int
	// Examples name a few of the broken ones.
	Examples []string
}

// maxExamples bounds Comparison.Examples.
const maxExamples = 5

// Holds tells whether ledger and books agree.
func (c Comparison) Holds() bool {
	return c.Missing == 0 && c.Altered == 0 && c.Strangers == 0 && c.Contradictions == 0
}

// String is the comparison in one line.
func (c Comparison) String() string {
	line := fmt.Sprintf("%s accepted, %s of them found", figure.Count(c.Accepted), figure.Count(c.Found))
	for _, part := range []struct {
		n    int
		name string
	}{
		{c.Refused, "refused later"},
		{c.Voided, "voided"},
		{c.Cancelled, "cancelled"},
		{c.Expired, "expired"},
		{c.Recovered, "without an answer, found"},
		{c.Missing, "missing"},
		{c.Altered, "altered"},
		{c.Strangers, "unknown to the crowd"},
		{c.Contradictions, "contradictions"},
	} {
		if part.n > 0 {
			line += fmt.Sprintf(", %s %s", figure.Count(part.n), part.name)
		}
	}
	return line
}

func (c *Comparison) example(format string, a ...any) {
	if len(c.Examples) < maxExamples {
		c.Examples = append(c.Examples, fmt.Sprintf(format, a...))
	}
}
