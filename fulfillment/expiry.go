package fulfillment

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/internal/pause"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/sql"
)

const (
	// sweepMax is how many orders one transaction expires or gives back at most.
	sweepMax = 500
	// sweepTurn is for how long a sweeper goes on with one thing while there is another one to do.
	sweepTurn = 10 * time.Second
)

// sweepOrders ends orders that nobody paid for in time, and has the units of those and of cancelled ones
// come back to Redis, until ctx ends. All workers do it, each with what the others do not have in hand.
// A Redis that is slow or away keeps no order from expiring.
func (w *Worker) sweepOrders(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { w.expireOrders(ctx) })
	all.Go(func() { w.releaseUnits(ctx) })
	all.Wait()
}

// expireOrders ends overdue orders until ctx ends.
func (w *Worker) expireOrders(ctx context.Context) {
	e := newExpirer(w.ledger, w.config.Logger)
	expiring := newTrouble(w.config.Logger, w.metrics, stepExpire, "expire orders that were not paid in time")
	for w.nextSweep(ctx) {
		expired, err := sweepSales(ctx, e.Some)
		if expired > 0 {
			w.metrics.Orders.WithLabelValues(string(reservation.StatusExpired)).Add(float64(expired))
			w.config.Logger.Info("ended orders that were not paid in time", "orders", expired)
		}
		w.metrics.ordersAside.Set(float64(len(e.aside)))
		if ctx.Err() != nil {
			return
		}
		expiring.note(err)
	}
}

// nextSweep waits until it is time to look again; false if ctx has ended.
func (w *Worker) nextSweep(ctx context.Context) bool {
	return pause.For(retry.RetryDelay(1, w.config.SweepInterval, w.config.SweepInterval), ctx.Done())
}

// sweepStep works on some orders of one sale that is not among except. It returns the sale, uuid.Nil if
// there is none, and how many orders it is done with. One that it cannot be done with it does not take
// again soon.
type sweepStep func(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, done int, err error)

// sweepSales repeats step until nothing is left or its turn is over. A sale in which it fails is left to
// the next turn, so that it keeps no other from its own.
func sweepSales(ctx context.Context, step sweepStep) (done int, err error) {
	except := []uuid.UUID{} // and not nil, which would be NULL
	var failed []error
	for began := time.Now(); time.Since(began) < sweepTurn; {
		limited, cancel := context.WithTimeout(ctx, recordTimeout)
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

// expireSome ends at most limit overdue orders of one sale in one transaction, and returns them; but no orders of aside. After
// an error it returns those that were to be ended.
func (l *Ledger) expireSome(ctx context.Context, except, aside []uuid.UUID, limit int) (orders []reservation.Order, err error) {
	var next reservation.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		if orders, err = lockOverdue(ctx, tx, except, aside, limit); err != nil || len(orders) == 0 {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeExpire)
		for _, o := range orders {
			if next, err = o.Expired(); err != nil {
				return err
			}
		}
		if err := writeChange(ctx, tx, reservation.EventExpired, orders, next); err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeExpireCommit)
		return nil
	})
	if err != nil {
		return orders, fmt.Errorf("expire orders: %w", err)
	}
	if len(orders) > 0 {
		crashpoint.Hit(crashpoint.AfterExpire)
		l.tellChanged(orders, next)
	}
	return orders, nil
}

func lockOverdue(ctx context.Context, tx pgx.Tx, except, aside []uuid.UUID, limit int) ([]reservation.Order, error) {
	rows, _ := tx.Query(ctx, sql.LedgerLockOverdue, except, limit, aside) // its error comes with the rows
	return pgx.CollectRows(rows, scanOrder)
}
