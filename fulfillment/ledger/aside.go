package ledger

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

const (
	// asideMax is how many orders a worker sets aside at most. With more, their sale is left to the next turn as a whole.
	asideMax = 1000
	// asideFor is when an order that was set aside is tried again: somebody may have mended it.
	asideFor = time.Minute
)

// SetAside is what the log says of an order that cannot expire. The audit names what is wrong with it.
const SetAside = "an overdue order contradicts what else is known of it, and is set aside"

// Expirer ends overdue orders. One that cannot be ended is found by halving, and set aside: it keeps the others of its
// sale from nothing.
type Expirer struct {
	ledger *Ledger
	log    *slog.Logger
	// Aside is until when an order is set aside.
	Aside map[uuid.UUID]time.Time
	// limit is how many orders one transaction ends at most. It is halved when one of them is at fault or when they take
	// too long, and sweepMax again when that one was found.
	limit int
}

func NewExpirer(ledger *Ledger, log *slog.Logger) *Expirer {
	return &Expirer{ledger: ledger, log: log, Aside: make(map[uuid.UUID]time.Time), limit: SweepMax}
}

// Some is a sweepStep.
func (e *Expirer) Some(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, expired int, err error) {
	for {
		orders, err := e.ledger.expireSome(ctx, except, e.passedOver(), e.limit)
		if len(orders) > 0 {
			sale = orders[0].SaleID
		}
		switch {
		case err == nil:
			e.limit = min(2*e.limit, SweepMax)
			for _, o := range orders {
				delete(e.Aside, o.ID)
			}
			return sale, len(orders), nil
		case len(orders) > 1 && (IsTooSlow(err) || isOfOrder(err)):
			e.limit = len(orders) / 2
		case len(orders) == 1 && isOfOrder(err) && e.setAside(orders[0], err):
			e.limit = SweepMax
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
		(FaultOf(err) == BadData || errors.Is(err, errNotLocked) || errors.Is(err, order.ErrIllegalTransition))
}

// setAside is false if there are too many already.
func (e *Expirer) setAside(o order.Order, why error) bool {
	_, again := e.Aside[o.ID]
	if len(e.Aside) >= asideMax && !again {
		return false
	}
	e.Aside[o.ID] = time.Now().Add(asideFor)
	if !again {
		e.log.Error(SetAside, "order", o.ID, "sale", o.SaleID, "error", why)
	}
	return true
}

// passedOver are the orders that are not to be tried yet.
func (e *Expirer) passedOver() []uuid.UUID {
	orders := []uuid.UUID{} // and not nil, which would be NULL
	now := time.Now()
	for order, until := range e.Aside {
		switch {
		case now.Before(until):
			orders = append(orders, order)
		case now.Sub(until) > asideFor: // nobody found it again
			delete(e.Aside, order)
		}
	}
	return orders
}
