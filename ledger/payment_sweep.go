package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// orderAwaited is how long money waits for an order that is in neither store.
	orderAwaited = 10 * time.Minute
	// lostOrderAwaited is that time if the stock of its sale was rebuilt since the order was made.
	lostOrderAwaited = 15 * time.Second
	// waitingMax bounds the payments of one look.
	waitingMax = 1000
)

// MayArrive reports whether an order may still come to Postgres, whose money was reported so long ago.
type MayArrive func(ctx context.Context, id uuid.UUID, ago time.Duration) (bool, error)

// SweepPayments decides about payments whose orders Postgres has by now, and makes the refund of those due whose orders
// are in neither store after ten minutes, or some seconds if their sale was rebuilt. MayArrive is asked before Postgres,
// so that an order which comes in between is found there. It returns how many it has decided about, and the first
// error.
func (l *Ledger) SweepPayments(ctx context.Context, mayArrive MayArrive) (decided int, err error) {
	var failed error
	position := int64(-1 << 63)
	for began := time.Now(); time.Since(began) < sweepTurn; {
		rows, _ := l.pool.Query(ctx, sql.PaymentWaiting, position, waitingMax) // rows carry the error
		found, err := pgx.CollectRows(rows, pgx.RowToStructByName[waitingPayment])
		if err != nil {
			return decided, fmt.Errorf("find waiting payments: %w", err)
		}
		var batch []*report
		for _, w := range found {
			position = w.Position
			r := &report{Money: order.Money{Reference: w.Reference, OrderID: w.OrderID}, waiting: true}
			if r.missing, err = w.missing(ctx, mayArrive); err != nil && failed == nil {
				failed = fmt.Errorf("payment=%s order=%s: %w", w.Reference, w.OrderID, err)
			}
			if w.Found || r.missing != "" {
				batch = append(batch, r)
			}
		}
		for len(batch) > 0 {
			n := min(len(batch), paymentsMax)
			done, err := l.decideWaiting(ctx, batch[:n])
			if decided += done; err != nil && failed == nil {
				failed = err
			}
			batch = batch[n:]
		}
		if len(found) < waitingMax {
			break
		}
	}
	return decided, failed
}

// waitingPayment is a row of waiting.sql.
type waitingPayment struct {
	Reference      string
	OrderID        uuid.UUID
	Position       int64
	Waits          float64
	Found, Rebuilt bool
}

// missing returns why the refund is due if Postgres does not have the order, or nothing if it may still come.
func (w *waitingPayment) missing(ctx context.Context, mayArrive MayArrive) (why order.PaymentReason, err error) {
	ago := time.Duration(w.Waits * float64(time.Second))
	switch {
	case w.Found:
		return "", nil
	case w.Rebuilt && ago >= lostOrderAwaited:
		why = order.RefundOrderVoided
	case ago >= orderAwaited:
		why = order.RefundOrderNotFound
	default:
		return "", nil
	}
	if isArriving, err := mayArrive(ctx, w.OrderID, ago); err != nil || isArriving {
		return "", err
	}
	return why, nil
}

// decideWaiting decides about payments that wait, together, or one by one if one of them cannot be decided.
func (l *Ledger) decideWaiting(ctx context.Context, batch []*report) (decided int, err error) {
	limited, cancel := context.WithTimeout(ctx, RecordTimeout)
	err = l.decideTogether(limited, batch, false)
	cancel()
	switch {
	case err == nil:
	case len(batch) == 1:
		return 0, fmt.Errorf("payment=%s order=%s: %w", batch[0].Reference, batch[0].OrderID, err)
	case !mayBeOfOne(err):
		return 0, err
	default:
		first, err := l.decideWaiting(ctx, batch[:len(batch)/2])
		second, secondErr := l.decideWaiting(ctx, batch[len(batch)/2:])
		if err == nil {
			err = secondErr
		}
		return first + second, err
	}
	for _, r := range batch {
		if !r.isLocked && r.payment.State != order.PaymentWaiting {
			decided++
		}
	}
	return decided, nil
}
