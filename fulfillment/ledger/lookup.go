package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/reservation/order"
	"stampede/sql"
)

// FindByReceipt returns the order of a receipt that Signer.Verify has accepted: as it is in Postgres, or
// voided if the sale's stock was rebuilt without the order. It returns order.ErrNotFound if the
// order may still be recorded. Every other error is one of Postgres.
//
// The epoch is read before the order. Every transaction that confirms orders locks the row of their sale
// and compares epochs (ledger/add_sold.sql), so an order of an earlier epoch that is still missing can
// never be confirmed.
func (l *Ledger) FindByReceipt(ctx context.Context, r order.Receipt) (order.Order, error) {
	batch := &pgx.Batch{}
	batch.Queue(sql.LedgerSaleEpoch, r.SaleID)
	batch.Queue(sql.LedgerFindOrders, []uuid.UUID{r.OrderID})
	answers := l.pool.SendBatch(ctx, batch)
	var epoch int64
	err := answers.QueryRow().Scan(&epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil // unknown sale: no epoch of it has ended
	}
	found, findErr := readOrders(answers)
	if err := errors.Join(err, findErr, answers.Close()); err != nil {
		return order.Order{}, fmt.Errorf("find the order of a receipt: order=%s: %w", r.OrderID, err)
	}
	if o, ok := found[r.OrderID]; ok {
		return o, nil
	}
	if epoch > r.Epoch {
		return r.Order(order.StatusVoided), nil
	}
	return order.Order{}, fmt.Errorf("order %s: %w", r.OrderID, order.ErrNotFound)
}

// FindOrders returns the orders with these ids that are in Postgres, unordered.
func (l *Ledger) FindOrders(ctx context.Context, ids []uuid.UUID) ([]order.Order, error) {
	rows, _ := l.pool.Query(ctx, sql.LedgerFindOrders, ids) // rows carry the error
	orders, err := pgx.CollectRows(rows, scanOrder)
	if err != nil {
		return nil, fmt.Errorf("find %d orders: %w", len(ids), err)
	}
	return orders, nil
}

// Ping returns nil if Postgres answers a query for orders.
func (l *Ledger) Ping(ctx context.Context) error {
	_, err := l.FindOrders(ctx, nil)
	return err
}

// ReceiptSecret returns the secret with which all ingresses on this database sign receipts by default.
func (l *Ledger) ReceiptSecret(ctx context.Context) (secret []byte, err error) {
	if err := l.pool.QueryRow(ctx, sql.LedgerReceiptSecret).Scan(&secret); err != nil {
		return nil, fmt.Errorf("read the secret for receipts: %w", err)
	}
	return secret, nil
}
