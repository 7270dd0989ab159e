package fulfillment

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
)

const (
	// asideMax is how many orders a worker sets aside at most. With more, their sale is left to the next turn as a whole.
	asideMax = 1000
	// asideFor is when an order that was set aside is tried again: somebody may have mended it.
	asideFor = time.Minute
)

// setAside is what the log says of an order that cannot expire. The audit names what is wrong with it.
const setAside = "an overdue order contradicts what else is known of it, and is set aside"

// expirer ends overdue orders. One that cannot be ended is found by halving, and set aside: it keeps the others of its
// sale from nothing.
type expirer struct {
	ledger *Ledger
	log    *slog.Logger
	// aside is until when an order is set aside.
	aside map[uuid.UUID]time.Time
	// limit is how many orders one transaction ends at most. It is halved when one of them is at fault or when they take
	// too long, and sweepMax again when that one was found.
	limit int
}

func newExpirer(ledger *Ledger, log *slog.Logger) *expirer {
	return &expirer{ledger: ledger, log: log, aside: make(map[uuid.UUID]time.Time), limit: sweepMax}
}

// Some is a sweepStep.
func (e *expirer) Some(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, expired int, err error) {
	for {
		orders, err := e.ledger.expireSome(ctx, except, e.passedOver(), e.limit)
		if len(orders) > 0 {
			sale = orders[0].SaleID
		}
		switch {
		case err == nil:
			e.limit = min(2*e.limit, sweepMax)
			for _, o := range orders {
				delete(e.aside, o.ID)
			}
			return sale, len(orders), nil
		case len(orders) > 1 && (isTooSlow(err) || isOfOrder(err)):
			e.limit = len(orders) / 2
		case len(orders) == 1 && isOfOrder(err) && e.setAside(orders[0], err):
			e.limit = sweepMax
		default:
			return sale, 0, err
		}
		if ctx.Err() != nil {
			return sale, 0, err
		}
	}
}

// isOfOrder tells whether one of the orders is at fault, and not their sale or the surroundings.
func isOfOrder(err error) bool {
	var ofSale *saleError
	return !errors.As(err, &ofSale) &&
		(faultOf(err) == badData || errors.Is(err, errNotLocked) || errors.Is(err, reservation.ErrIllegalTransition))
}

// setAside is false if there are too many already.
func (e *expirer) setAside(o reservation.Order, why error) bool {
	_, again := e.aside[o.ID]
	if len(e.aside) >= asideMax && !again {
		return false
	}
	e.aside[o.ID] = time.Now().Add(asideFor)
	if !again {
		e.log.Error(setAside, "order", o.ID, "sale", o.SaleID, "error", why)
	}
	return true
}

// passedOver are the orders that are not to be tried yet.
func (e *expirer) passedOver() []uuid.UUID {
	orders := []uuid.UUID{} // and not nil, which would be NULL
	now := time.Now()
	for order, until := range e.aside {
		switch {
		case now.Before(until):
			orders = append(orders, order)
		case now.Sub(until) > asideFor: // nobody found it again
			delete(e.aside, order)
		}
	}
	return orders
}
