package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// SweepStep works on some orders of one sale that is not in except. It returns the sale, or uuid.Nil if
// there is none, and how many orders it finished. Orders that it cannot finish are postponed.
type SweepStep func(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, done int, err error)

// SweepSales repeats step until nothing is left or sweepTurn is over. A sale in which step fails waits
// for the next turn, so that it does not block others.
func SweepSales(ctx context.Context, step SweepStep) (done int, err error) {
	except := []uuid.UUID{} // not nil, which would be NULL
	var failed []error
	for began := time.Now(); time.Since(began) < sweepTurn; {
		limited, cancel := context.WithTimeout(ctx, RecordTimeout)
		sale, n, err := step(limited, except)
		cancel()
		switch {
		case err != nil && sale == uuid.Nil:
			return done, errors.Join(append(failed, err)...)
		case err != nil:
			except = append(except, sale)
			failed = append(failed, fmt.Errorf("sale=%s: %w", sale, err))
		case sale == uuid.Nil:
			return done, errors.Join(failed...)
		}
		done += n
	}
	return done, errors.Join(failed...)
}
