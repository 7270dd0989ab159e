package ledger

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"stampede/internal/tracing"
	"stampede/reservation/order"
	"stampede/sql"
)

// Columns holds events as the arrays that record_orders.sql and record_fresh.sql take, each order once.
type Columns struct {
	orders, sales                 []idCell
	users                         []textCell
	quantities, sequences, epochs []numberCell
	reservedAt                    []timeCell
	keys                          []textCell
	// lines ends with the last row that has some: rows beyond its end have NULL. So sales without items have no column.
	lines  []textCell
	firsts []int // index in the batch of the row's first event
	traces []tracedRow
}

// tracedRow is a row of an order that is traced.
type tracedRow struct {
	row    int
	parent string
}

// ColumnsOf returns the columns and each event's row in them.
func ColumnsOf(events []order.OrderReserved) (*Columns, []int) {
	n := len(events)
	c := &Columns{
		orders: make([]idCell, 0, n), sales: make([]idCell, 0, n), users: make([]textCell, 0, n),
		quantities: make([]numberCell, 0, n), sequences: make([]numberCell, 0, n), epochs: make([]numberCell, 0, n),
		reservedAt: make([]timeCell, 0, n), keys: make([]textCell, 0, n), firsts: make([]int, 0, n),
	}
	rowOf := make(map[uuid.UUID]int, n)
	rows := make([]int, n)
	for i, e := range events {
		row, known := rowOf[e.OrderID]
		if !known {
			row = len(c.orders)
			rowOf[e.OrderID] = row
			c.orders, c.sales, c.users = append(c.orders, idCell(e.OrderID)), append(c.sales, idCell(e.SaleID)),
				append(c.users, textCell(e.UserID))
			c.quantities, c.sequences = append(c.quantities, numberCell(e.Quantity)), append(c.sequences, numberCell(e.Sequence))
			c.epochs, c.reservedAt = append(c.epochs, numberCell(e.Epoch)), append(c.reservedAt, timeCell(e.ReservedAt))
			c.keys, c.firsts = append(c.keys, textCell(e.KeyFingerprint)), append(c.firsts, i)
			if e.Lines != "" {
				c.lines = append(append(c.lines, make([]textCell, row-len(c.lines))...), textCell(e.Lines))
			}
			if e.TraceParent != "" {
				c.traces = append(c.traces, tracedRow{row, e.TraceParent})
			}
		}
		rows[i] = row
	}
	return c, rows
}

// Arguments returns the columns as parameters $1 to $9.
func (c *Columns) Arguments() []any {
	return []any{
		array[idCell](c.orders), array[idCell](c.sales), array[textCell](c.users), array[numberCell](c.quantities),
		array[numberCell](c.sequences), array[numberCell](c.epochs), array[timeCell](c.reservedAt), array[textCell](c.keys),
		array[textCell](c.lines),
	}
}

// saleOrders are orders of one sale.
type saleOrders struct {
	sale   uuid.UUID
	orders []uuid.UUID
}

// ordersBySale are orders of several sales, for queries that each read the month of one sale.
type ordersBySale []saleOrders

// add adds an order. Sales are few; most orders have the sale of the previous one.
func (all *ordersBySale) add(sale, id uuid.UUID) {
	i := slices.IndexFunc(*all, func(group saleOrders) bool { return group.sale == sale })
	if i < 0 {
		i = len(*all)
		*all = append(*all, saleOrders{sale: sale})
	}
	(*all)[i].orders = append((*all)[i].orders, id)
}

// ordersWith returns the orders whose word is one of these.
func (c *Columns) ordersWith(words []string, wanted ...string) (found ordersBySale) {
	for row, word := range words {
		if slices.Contains(wanted, word) {
			found.add(uuid.UUID(c.sales[row]), uuid.UUID(c.orders[row]))
		}
	}
	return found
}

// saleUnits is the change of a sale's counter in one transaction.
type saleUnits struct {
	id    uuid.UUID
	units int64
	// items are the units of each item by its place; nil in a sale without items.
	items []int64
	// lastSequence is the highest sequence of the orders that hold the units; epoch is their earliest
	// epoch.
	lastSequence, epoch int64
}

// sumUnits sums the units of confirmed rows by sale, sorted by sale id.
func (c *Columns) sumUnits(confirmed func(row int) bool) []saleUnits {
	sums := map[uuid.UUID]saleUnits{}
	for row := range c.orders {
		if !confirmed(row) {
			continue
		}
		sale, sequence, epoch := uuid.UUID(c.sales[row]), int64(c.sequences[row]), int64(c.epochs[row])
		sum, known := sums[sale]
		if !known {
			sum.id, sum.epoch = sale, epoch
		}
		sum.units += int64(c.quantities[row])
		if row < len(c.lines) {
			sum.items = addUnits(sum.items, order.Lines(c.lines[row]))
		}
		sum.lastSequence, sum.epoch = max(sum.lastSequence, sequence), min(sum.epoch, epoch)
		sums[sale] = sum
	}
	return inOrder(sums)
}

// addUnits adds the lines of an order to the units of each item.
func addUnits(items []int64, lines order.Lines) []int64 {
	if lines != "" && items == nil {
		items = make([]int64, order.MaxItems)
	}
	for item, units := range lines.Each() {
		items[item] += units
	}
	return items
}

// inOrder sorts by sale id: every transaction locks the rows of sales in this order.
func inOrder(sums map[uuid.UUID]saleUnits) []saleUnits {
	return slices.SortedFunc(maps.Values(sums), func(a, b saleUnits) int { return bytes.Compare(a.id[:], b.id[:]) })
}

// array is a column that pgx encodes. It yields pointers to cells that encode themselves: for a
// []uuid.UUID pgx would use reflection and several allocations per element.
type array[T any] []T

func (a array[T]) Dimensions() []pgtype.ArrayDimension {
	if a == nil {
		return nil // NULL
	}
	return []pgtype.ArrayDimension{{Length: int32(len(a)), LowerBound: 1}}
}

func (a array[T]) Index(i int) any { return &a[i] }

func (array[T]) IndexType() any { return new(T) }

// The cells of columns.
type (
	idCell     uuid.UUID
	textCell   string // NULL if it is empty
	numberCell int64
	timeCell   time.Time
)

func (c *idCell) UUIDValue() (pgtype.UUID, error) {
	return pgtype.UUID{Bytes: *c, Valid: true}, nil
}

func (c *textCell) TextValue() (pgtype.Text, error) {
	return pgtype.Text{String: string(*c), Valid: *c != ""}, nil
}

func (c *numberCell) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*c), Valid: true}, nil
}

func (c *timeCell) TimestamptzValue() (pgtype.Timestamptz, error) {
	return pgtype.Timestamptz{Time: time.Time(*c), Valid: true}, nil
}

// reservedVersion is the version of the first event of an order in Postgres.
const reservedVersion = 2

// saleTraces are the traces of orders of one sale.
type saleTraces struct {
	sale    uuid.UUID
	orders  []uuid.UUID
	parents []string
}

// tracesBySale returns the traces of the rows that are recorded now, by sale. A batch is sorted by sale.
func (c *Columns) tracesBySale(recorded func(row int) bool) (traces []saleTraces) {
	for _, t := range c.traces {
		if !recorded(t.row) {
			continue
		}
		sale := uuid.UUID(c.sales[t.row])
		if last := len(traces) - 1; last < 0 || traces[last].sale != sale {
			traces = append(traces, saleTraces{sale: sale})
		}
		group := &traces[len(traces)-1]
		group.orders, group.parents = append(group.orders, uuid.UUID(c.orders[t.row])), append(group.parents, t.parent)
	}
	return traces
}

// isFresh reports whether an event of this word was recorded by this transaction.
func isFresh(word string) bool {
	return word == wordConfirmed || word == wordRejected || word == wordVoided
}

// queueTraces queues a statement for each sale with traced orders. There is none in nearly every batch.
func queueTraces(batch *pgx.Batch, traces []saleTraces) {
	for _, group := range traces {
		batch.Queue(sql.LedgerNoteTraces, group.sale, group.orders, group.parents, reservedVersion)
	}
}

// noteTrace notes the trace in which an order changes to this, if there is one.
func noteTrace(ctx context.Context, tx pgx.Tx, o order.Order) error {
	parent := tracing.Current(ctx).Parent()
	if parent == "" {
		return nil
	}
	_, err := tx.Exec(ctx, sql.LedgerNoteTraces, o.SaleID, []uuid.UUID{o.ID}, []string{parent}, o.Version)
	return err
}

// inSpan runs a transaction in a span of its own, below the one of the context.
func inSpan(ctx context.Context, c *Columns, transaction func(context.Context) error) error {
	span := tracing.Current(ctx).Start(tracing.Internal, "transaction")
	defer span.End()
	span.Number("stampede.orders", int64(len(c.orders)))
	err := transaction(span.In(ctx))
	span.Fail(err)
	return err
}
