package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// SweepMax is how many orders one transaction expires or gives back at most.
	SweepMax = 500
	// sweepTurn is for how long a sweeper goes on with one thing while there is another one to do.
	sweepTurn = 10 * time.Second
)

// expireSome ends at most limit overdue orders of one sale in one transaction, and returns them; but no orders of aside. After
// an error it returns those that were to be ended.
func (l *Ledger) expireSome(ctx context.Context, except, aside []uuid.UUID, limit int) (orders []order.Order, err error) {
	var next order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		if orders, err = LockOverdue(ctx, tx, except, aside, limit); err != nil || len(orders) == 0 {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeExpire)
		for _, o := range orders {
			if next, err = o.Expired(); err != nil {
				return err
			}
		}
		if err := writeChange(ctx, tx, order.EventExpired, orders, next); err != nil {
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

func LockOverdue(ctx context.Context, tx pgx.Tx, except, aside []uuid.UUID, limit int) ([]order.Order, error) {
	rows, _ := tx.Query(ctx, sql.LedgerLockOverdue, except, limit, aside) // its error comes with the rows
	return pgx.CollectRows(rows, scanOrder)
}
