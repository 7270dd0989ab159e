package ledger

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"stampede/internal/tracing"
	"stampede/reservation/order"
	"stampede/sql"
	"stampede/stream"
)

// BatchMax bounds the orders that one transaction records. Larger batches are hardly cheaper, and hold locks longer.
const BatchMax = 500

// BySaleAndSequence is the order in which events are recorded, so that the earliest orders get the last
// units.
func BySaleAndSequence(x, y order.OrderReserved) int {
	return cmp.Or(strings.Compare(string(x.SaleID[:]), string(y.SaleID[:])), cmp.Compare(x.Sequence, y.Sequence))
}

// Transaction records some events.
type Transaction func(context.Context) ([]Outcome, error)

// RecordWith records a batch with the given try. After a transient error of try, the events of that
// transaction fail with it; any other error belongs to one event.
func RecordWith(
	ctx context.Context, ledger *Ledger, try func(context.Context, Transaction) ([]Outcome, error),
	events []order.OrderReserved,
) []Outcome {
	r := BatchRecording{Ledger: ledger, Try: try, Limit: len(events)}
	return r.Record(ctx, events)
}

// BatchRecording records one batch, in several transactions if some of its events cannot be recorded.
type BatchRecording struct {
	Ledger *Ledger
	// Try runs a transaction, and may retry it.
	Try func(context.Context, Transaction) ([]Outcome, error)
	// SplitBlocked splits the events of a transaction that a lock or a time limit has blocked.
	SplitBlocked bool
	// OneSale says that all events are of one blocked sale.
	OneSale bool
	// Limit bounds the events of one transaction; Slow is set when a slow transaction has lowered it.
	Limit int
	Slow  bool

	// tooMany is, by sale, orders that its stock in Postgres did not hold. They save a batch for a sold-out sale or item
	// from being halved down to single events.
	tooMany map[uuid.UUID][]order.OrderReserved
	// blocked is, by sale, why its events are blocked.
	blocked map[uuid.UUID]error
	// stopped is set when the worker was stopped during the recording.
	stopped error
}

// Record returns one outcome per event, in their order. The events of a sale are adjacent.
func (r *BatchRecording) Record(ctx context.Context, events []order.OrderReserved) []Outcome {
	switch from, to, blocked := r.firstBlocked(events); {
	case len(events) == 0:
		return nil
	case r.stopped != nil:
		return allFailed(events, r.stopped)
	case blocked != nil:
		return slices.Concat(
			r.Record(ctx, events[:from]), allFailed(events[from:to], blocked), r.Record(ctx, events[to:]))
	case len(events) > r.Limit:
		return r.inParts(ctx, events, r.Limit)
	case len(r.tooMany) > 0 && slices.ContainsFunc(events, r.isSoldOut):
		return r.refuseSoldOut(ctx, events)
	}
	outcomes, err := r.Try(ctx, func(ctx context.Context) ([]Outcome, error) { return r.Ledger.Record(ctx, events) })
	if err != nil {
		return r.failed(ctx, events, err)
	}
	return outcomes
}

// failed handles the error of a transaction. It belongs to all events, or to some that smaller transactions find.
func (r *BatchRecording) failed(ctx context.Context, events []order.OrderReserved, err error) []Outcome {
	switch {
	case errors.Is(err, stream.ErrStopping):
		r.stopped = err
	case r.SplitBlocked && (IsLocked(err) || IsTooSlow(err)):
		return r.splitBlocked(ctx, events, err)
	case FaultOf(err) == Transient:
	case len(events) > 1:
		return r.inParts(ctx, events, len(events)/2)
	case FaultOf(err) == oversold:
		if r.tooMany == nil {
			r.tooMany = make(map[uuid.UUID][]order.OrderReserved)
		}
		r.tooMany[events[0].SaleID] = append(r.tooMany[events[0].SaleID], events[0])
		return r.refuse(ctx, events)
	}
	return allFailed(events, err)
}

// inParts records the first n events before the others: the earlier orders have priority.
func (r *BatchRecording) inParts(ctx context.Context, events []order.OrderReserved, n int) []Outcome {
	return append(r.Record(ctx, events[:n:n]), r.Record(ctx, events[n:])...)
}

func (r *BatchRecording) bySale(ctx context.Context, events []order.OrderReserved) (outcomes []Outcome) {
	for len(events) > 0 {
		_, n := saleRange(events, events[0].SaleID)
		outcomes = append(outcomes, r.Record(ctx, events[:n:n])...)
		events = events[n:]
	}
	return outcomes
}

// splitBlocked records events in smaller transactions after one with all of them was blocked.
func (r *BatchRecording) splitBlocked(ctx context.Context, events []order.OrderReserved, err error) []Outcome {
	blocked := fmt.Errorf("%w: %w", ErrBlocked, err)
	var inSale *saleError
	if errors.As(err, &inSale) && IsLocked(err) {
		r.block(inSale.sale, blocked)
		return r.Record(ctx, events)
	}
	switch _, first := saleRange(events, events[0].SaleID); {
	case first < len(events):
		return r.bySale(ctx, events)
	case len(events) > 1 && IsTooSlow(err):
		r.Limit, r.Slow = len(events)/2, true
		return r.Record(ctx, events)
	case len(events) > 1 && r.OneSale:
		return r.inParts(ctx, events, len(events)/2)
	case !r.OneSale:
		r.block(events[0].SaleID, blocked)
	}
	return allFailed(events, blocked)
}

// block excludes the sale's events from the further transactions of this batch.
func (r *BatchRecording) block(sale uuid.UUID, err error) {
	if r.blocked == nil {
		r.blocked = make(map[uuid.UUID]error)
	}
	r.blocked[sale] = err
}

// firstBlocked returns the range of the events of a blocked sale, and why it is blocked. The error is nil if no sale of
// the events is.
func (r *BatchRecording) firstBlocked(events []order.OrderReserved) (from, to int, why error) {
	for sale, why := range r.blocked {
		if from, to := saleRange(events, sale); from < to {
			return from, to, why
		}
	}
	return 0, 0, nil
}

// saleRange returns the range of a sale's events, which are adjacent.
func saleRange(events []order.OrderReserved, sale uuid.UUID) (from, to int) {
	belongs := func(e order.OrderReserved) bool { return e.SaleID == sale }
	if from = slices.IndexFunc(events, belongs); from < 0 {
		return 0, 0
	}
	for to = from + 1; to < len(events) && belongs(events[to]); to++ {
	}
	return from, to
}

// isSoldOut reports whether the stock is known not to hold an event.
func (r *BatchRecording) isSoldOut(e order.OrderReserved) bool {
	return slices.ContainsFunc(r.tooMany[e.SaleID], func(refused order.OrderReserved) bool { return holds(e, refused) })
}

// refuseSoldOut refuses the events that the stock is known not to hold, and records the others.
func (r *BatchRecording) refuseSoldOut(ctx context.Context, events []order.OrderReserved) []Outcome {
	var soldOut, others []order.OrderReserved
	var places []int // of those sold out, and then of the others
	for i, e := range events {
		if r.isSoldOut(e) {
			places, soldOut = slices.Insert(places, len(soldOut), i), append(soldOut, e)
		} else {
			places, others = append(places, i), append(others, e)
		}
	}
	outcomes := make([]Outcome, len(events))
	for i, out := range append(r.refuse(ctx, soldOut), r.Record(ctx, others)...) {
		outcomes[places[i]] = out
	}
	return outcomes
}

// holds reports whether an order has at least the units of another one, of each item.
func holds(e, other order.OrderReserved) bool {
	var items [order.MaxItems]int64
	for item, units := range e.Lines.Each() {
		items[item] = units
	}
	for item, units := range other.Lines.Each() {
		if items[item] < units {
			return false
		}
	}
	return e.Quantity >= other.Quantity && (e.Lines == "") == (other.Lines == "")
}

func (r *BatchRecording) refuse(ctx context.Context, events []order.OrderReserved) []Outcome {
	outcomes, err := r.Try(ctx, func(ctx context.Context) ([]Outcome, error) {
		return r.Ledger.Refuse(ctx, events, order.RejectedSoldOut)
	})
	if r.SplitBlocked && (IsLocked(err) || IsTooSlow(err)) {
		err = fmt.Errorf("%w: %w", ErrBlocked, err)
	}
	if err != nil {
		return allFailed(events, err)
	}
	return outcomes
}

// Attempt runs a transaction under RecordTimeout.
func Attempt(ctx context.Context, log *slog.Logger, t Transaction) (outcomes []Outcome, err error) {
	defer func() {
		if p := recover(); p != nil {
			log.ErrorContext(ctx, "panic while recording a batch", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %v", ErrPanicked, p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	return t(ctx)
}

func allFailed(events []order.OrderReserved, err error) []Outcome {
	outcomes := make([]Outcome, len(events))
	for i, e := range events {
		outcomes[i] = Outcome{Event: e, Err: err}
	}
	return outcomes
}

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
