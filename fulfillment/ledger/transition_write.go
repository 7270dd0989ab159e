package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file writes the transitions that order/transition.go decides.

// Pay records that the user's order was paid, and returns it. reference is the payment provider's id of
// the payment. Retries with the same reference change nothing.
//
// The error is an *order.InvalidError for the reference; order.ErrNotFound, also for another user's
// order; order.ErrExpired once the deadline has passed; wraps order.ErrIllegalTransition, and is an
// *order.AlreadyPaidError for an order paid with another reference; wraps order.ErrDamaged; or is
// one of Postgres.
func (l *Ledger) Pay(ctx context.Context, o uuid.UUID, user, reference string) (order.Order, error) {
	paid, err := l.change(ctx, o, user, order.EventPaid, func(o order.Order, overdue bool) (order.Order, bool, error) {
		return o.Paid(reference, overdue)
	})
	if err != nil {
		return order.Order{}, fmt.Errorf("pay order=%s: %w", o, err)
	}
	return paid, nil
}

// Cancel cancels the user's order and returns it. Retries change nothing. Its units are on sale again,
// and its user may buy again, as soon as a worker has released the units in Redis.
//
// The errors are those of Pay.
func (l *Ledger) Cancel(ctx context.Context, o uuid.UUID, user string) (order.Order, error) {
	cancelled, err := l.change(ctx, o, user, order.EventCancelled, order.Order.Cancelled)
	if err != nil {
		return order.Order{}, fmt.Errorf("cancel order=%s: %w", o, err)
	}
	return cancelled, nil
}

// decision is a rule of order/transition.go: it returns the order after a transition.
type decision func(o order.Order, overdue bool) (next order.Order, changed bool, err error)

// change applies one event to the user's order: it reads, decides and writes in one transaction that
// locks the row.
func (l *Ledger) change(
	ctx context.Context, id uuid.UUID, user string, event order.EventType, decide decision,
) (next order.Order, err error) {
	var changed []order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		o, overdue, err := l.LockOrder(ctx, tx, id, user)
		if err != nil {
			return err
		}
		var isChange bool
		if next, isChange, err = decide(o, overdue); err != nil || !isChange {
			return err
		}
		changed = []order.Order{o}
		return writeChange(ctx, tx, event, changed, next)
	})
	switch {
	case err == nil:
		l.publishChanged(changed, next)
	case FaultOf(err) == BadData, errors.Is(err, errNotLocked):
		err = fmt.Errorf("%w: %w", order.ErrDamaged, err)
	}
	return next, err
}

// inTransaction runs f in a transaction, and commits unless f fails. It is read committed, whatever the
// server's default is: after a wait for a row's lock, f must see what was committed meanwhile.
func (l *Ledger) inTransaction(ctx context.Context, f func(pgx.Tx) error) error {
	return catalog.InTransaction(ctx, l.pool, pgx.TxOptions{BeginQuery: beginRecording + "; " + l.limitLocks}, f)
}

// LockOrder locks and returns the user's order, and reports whether its deadline has passed.
func (l *Ledger) LockOrder(
	ctx context.Context, tx pgx.Tx, id uuid.UUID, user string,
) (o order.Order, overdue bool, err error) {
	known := knownToAll.of([]uuid.UUID{id})
	for _, of := range known {
		if o, overdue, err = lockOrderOf(ctx, tx, of.sale, id, user); !errors.Is(err, order.ErrNotFound) {
			return o, overdue, err
		}
	}
	others, err := otherSalesOf(ctx, tx, []uuid.UUID{id}, known)
	if err != nil {
		return order.Order{}, false, err
	}
	for _, of := range others {
		if o, overdue, err = lockOrderOf(ctx, tx, of.sale, id, user); !errors.Is(err, order.ErrNotFound) {
			knownToAll.add(of.sale)
			return o, overdue, err
		}
	}
	return order.Order{}, false, order.ErrNotFound
}

func lockOrderOf(
	ctx context.Context, tx pgx.Tx, sale, id uuid.UUID, user string,
) (o order.Order, overdue bool, err error) {
	rows, _ := tx.Query(ctx, sql.LedgerLockOrder, sale, id, user) // rows carry the error
	locked, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
		orderRow
		Overdue bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrNotFound
	}
	return locked.order(), locked.Overdue, err
}

// errNotLocked is returned when an order was changed while another transaction had its row locked.
var errNotLocked = errors.New("an order was changed without its lock")

// writeChange writes the event of these orders of one sale, given as they were read, which all change to next.
func writeChange(ctx context.Context, tx pgx.Tx, event order.EventType, orders []order.Order, next order.Order) error {
	ids, versions := make([]uuid.UUID, len(orders)), make([]int, len(orders))
	for i, o := range orders {
		ids[i], versions[i] = o.ID, o.Version
	}
	var reference *string
	if next.PaymentReference != "" {
		reference = &next.PaymentReference
	}
	released := !next.Status.Live()
	var changed int
	if err := tx.QueryRow(ctx, sql.LedgerChangeOrders, ids, versions, next.Status, event, reference,
		released, orders[0].SaleID).Scan(&changed); err != nil {
		return err
	}
	if changed != len(orders) {
		return fmt.Errorf("%w: %d of %d are unchanged since they were read", errNotLocked, changed, len(orders))
	}
	if !released {
		return nil
	}
	sale, units := orders[0].SaleID, int64(0)
	for _, o := range orders {
		units += o.Quantity
	}
	if _, err := tx.Exec(ctx, sql.LedgerReturnSold, sale, units); err != nil {
		return &saleError{sale, err}
	}
	return nil
}
