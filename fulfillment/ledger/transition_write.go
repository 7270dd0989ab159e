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

// This file writes the transitions that reservation/transition.go decides.

// Pay records that the user's order was paid, and returns it. To repeat it with the same reference,
// which is the payment provider's name for the payment, changes nothing; so whoever does not know
// whether it was recorded asks again.
//
// The error is a *reservation.InvalidError for the reference; reservation.ErrOrderNotFound, also for
// another user's order; reservation.ErrOrderExpired, from the moment on at which the time is over;
// wraps reservation.ErrIllegalTransition, and is a *reservation.AlreadyPaidError for an order that was paid with another reference;
// wraps reservation.ErrOrderDamaged; or is one of Postgres.
func (l *Ledger) Pay(ctx context.Context, o uuid.UUID, user, reference string) (order.Order, error) {
	paid, err := l.change(ctx, o, user, order.EventPaid, func(o order.Order, overdue bool) (order.Order, bool, error) {
		return o.Paid(reference, overdue)
	})
	if err != nil {
		return order.Order{}, fmt.Errorf("pay order=%s: %w", o, err)
	}
	return paid, nil
}

// Cancel gives up the user's order, and returns it. A repeat changes nothing. Its units are for sale
// again as soon as a worker has told Redis; until then its user cannot buy again.
//
// The errors are those of Pay.
func (l *Ledger) Cancel(ctx context.Context, o uuid.UUID, user string) (order.Order, error) {
	cancelled, err := l.change(ctx, o, user, order.EventCancelled, order.Order.Cancelled)
	if err != nil {
		return order.Order{}, fmt.Errorf("cancel order=%s: %w", o, err)
	}
	return cancelled, nil
}

// decision is a rule of reservation/transition.go: it returns the order after a transition.
type decision func(o order.Order, overdue bool) (next order.Order, changed bool, err error)

// change takes the user's order one event further: read, decided and written in one transaction that
// has its row locked.
func (l *Ledger) change(ctx context.Context, id uuid.UUID, user string, event order.EventType, decide decision) (next order.Order, err error) {
	var changed []order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		o, overdue, err := LockOrder(ctx, tx, id, user)
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
		l.tellChanged(changed, next)
	case FaultOf(err) == BadData, errors.Is(err, errNotLocked):
		err = fmt.Errorf("%w: %w", order.ErrOrderDamaged, err)
	}
	return next, err
}

// inTransaction commits what f has done, unless that failed. Read committed, whatever the server's
// default is: who waited for a row's lock must see what was committed meanwhile.
func (l *Ledger) inTransaction(ctx context.Context, f func(pgx.Tx) error) error {
	return catalog.InTransaction(ctx, l.pool, pgx.TxOptions{BeginQuery: beginRecording + "; " + l.limitLocks}, f)
}

func LockOrder(ctx context.Context, tx pgx.Tx, id uuid.UUID, user string) (o order.Order, overdue bool, err error) {
	rows, _ := tx.Query(ctx, sql.LedgerLockOrder, id, user) // its error comes with the rows
	locked, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[struct {
		orderRow
		Overdue bool
	}])
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrOrderNotFound
	}
	return locked.order(), locked.Overdue, err
}

// errNotLocked: somebody changed an order while another transaction had its row locked. Nothing of ours does.
var errNotLocked = errors.New("an order was changed without its lock")

// writeChange writes the event of these orders, which are as they were read. They all become what next is.
func writeChange(ctx context.Context, tx pgx.Tx, event order.EventType, orders []order.Order, next order.Order) error {
	ids, versions := make([]uuid.UUID, len(orders)), make([]int, len(orders))
	for i, o := range orders {
		ids[i], versions[i] = o.ID, o.Version
	}
	var reference *string
	if next.PaymentReference != "" {
		reference = &next.PaymentReference
	}
	comeBack := !next.Status.Live()
	var changed int
	if err := tx.QueryRow(ctx, sql.LedgerChangeOrders, ids, versions, next.Status, event, reference, comeBack).Scan(&changed); err != nil {
		return err
	}
	if changed != len(orders) {
		return fmt.Errorf("%w: %d of %d are as they were read", errNotLocked, changed, len(orders))
	}
	if !comeBack {
		return nil
	}
	for _, sale := range unitsOf(orders) {
		if _, err := tx.Exec(ctx, sql.LedgerReturnSold, sale.id, sale.units); err != nil {
			return &saleError{sale.id, err}
		}
	}
	return nil
}

// unitsOf sums the units of the orders by sale, in the order of the sales' ids.
func unitsOf(orders []order.Order) []saleUnits {
	sums := map[uuid.UUID]saleUnits{}
	for _, o := range orders {
		sums[o.SaleID] = saleUnits{id: o.SaleID, units: sums[o.SaleID].units + o.Quantity}
	}
	return inOrder(sums)
}
