package ledger

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/tracing"
	"stampede/reservation/order"
	"stampede/sql"
)

// reservedVersion is the version of the first event of an order in Postgres.
const reservedVersion = 2

// saleTraces are the traces of orders of one sale.
type saleTraces struct {
	sale    uuid.UUID
	orders  []uuid.UUID
	parents []string
}

// tracesOf returns the traces of the rows that are recorded now, by sale. A batch is sorted by sale.
func (c *Columns) tracesOf(recorded func(row int) bool) (traces []saleTraces) {
	for _, t := range c.traces {
		if !recorded(t.row) {
			continue
		}
		sale := uuid.UUID(c.sales[t.row])
		if last := len(traces) - 1; last < 0 || traces[last].sale != sale {
			traces = append(traces, saleTraces{sale: sale})
		}
		of := &traces[len(traces)-1]
		of.orders, of.parents = append(of.orders, uuid.UUID(c.orders[t.row])), append(of.parents, t.parent)
	}
	return traces
}

// isFresh reports whether an event of this word was recorded by this transaction.
func isFresh(word string) bool {
	return word == wordConfirmed || word == wordRejected || word == wordVoided
}

// queueTraces queues a statement for each sale with traced orders. There is none in nearly every batch.
func queueTraces(batch *pgx.Batch, traces []saleTraces) {
	for _, of := range traces {
		batch.Queue(sql.LedgerNoteTraces, of.sale, of.orders, of.parents, reservedVersion)
	}
}

// noteTrace notes the trace in which an order changes to this, if there is one.
func noteTrace(ctx context.Context, tx pgx.Tx, o order.Order) error {
	parent := tracing.Of(ctx).Parent()
	if parent == "" {
		return nil
	}
	_, err := tx.Exec(ctx, sql.LedgerNoteTraces, o.SaleID, []uuid.UUID{o.ID}, []string{parent}, o.Version)
	return err
}

// inSpan runs a transaction in a span of its own, below the one of the context.
func inSpan(ctx context.Context, c *Columns, transaction func(context.Context) error) error {
	span := tracing.Of(ctx).Start(tracing.Internal, "transaction")
	defer span.End()
	span.Number("stampede.orders", int64(len(c.orders)))
	err := transaction(span.In(ctx))
	span.Fail(err)
	return err
}
