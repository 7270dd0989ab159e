package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// SweepMax bounds the orders that one transaction expires or releases.
	SweepMax = 500
	// sweepTurn bounds the time that a sweeper spends on one task while another one waits.
	sweepTurn = 10 * time.Second
)

// expireSome ends at most limit overdue orders of one sale in one transaction, except those in aside, and
// returns them. After an error it returns the orders that it tried to end.
func (l *Ledger) expireSome(
	ctx context.Context, except, aside []uuid.UUID, limit int,
) (orders []order.Order, err error) {
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
		if _, err := writeChange(ctx, tx, change{event: order.EventExpired}, orders, next); err != nil {
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
		l.publishChanged(orders, next)
	}
	return orders, nil
}

// LockOverdue locks and returns at most limit overdue orders of one sale that is not in except.
func LockOverdue(ctx context.Context, tx pgx.Tx, except, aside []uuid.UUID, limit int) ([]order.Order, error) {
	var sale uuid.UUID
	err := tx.QueryRow(ctx, sql.LedgerOverdueSale, except, aside).Scan(&sale)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	rows, _ := tx.Query(ctx, sql.LedgerLockOverdue, sale, limit, aside) // rows carry the error
	return pgx.CollectRows(rows, scanOrder)
}
