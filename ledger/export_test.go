package ledger

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"stampede/reservation/order"
)

func (x *Outcomes) Published() prometheus.Counter { return x.published }

func (x *Outcomes) Dropped() prometheus.Counter { return x.dropped }

func (x *Outcomes) Enqueue(outcomes []order.OrderOutcome) {
	x.enqueue([][]order.OrderOutcome{outcomes})
}

const OutcomesQueued = outcomesQueued

const OutcomesKept = outcomesKept

func WriteExpiry(ctx context.Context, tx pgx.Tx, orders []order.Order, next order.Order) error {
	_, err := writeChange(ctx, tx, change{event: order.EventExpired}, orders, next)
	return err
}

const Oversold = oversold

var (
	ErrNotLocked   = errNotLocked
	ErrOversold    = errOversold
	ErrUnknownSale = errUnknownSale
	ErrWrongItems  = errWrongItems
)
