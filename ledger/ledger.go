// Package ledger writes orders to Postgres: everything that happens to an order after Redis has
// admitted it.
//
//   - Ledger.Record (ledger.go) records a batch of reservations in one transaction; RecordWith
//     (record_batch.go) returns the outcome of every event even if some events are invalid;
//     errors.go classifies errors.
//   - Ledger.Pay and Ledger.Cancel (transition_write.go) are a buyer's actions; package order
//     decides whether they are legal.
//   - Expirer (expire.go) ends orders that were not paid in time, and SweepReleases
//     (transition_write.go) releases the units of ended orders in Redis. Heartbeat (expire.go) is
//     the payment clock: time without an ingress or without Postgres does not count.
//   - Outcomes (outcomes.go) publishes what was written to the ingresses.
//
// Everything here may run twice, in any process: the unique keys in Postgres give an event one effect.
package ledger

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/reservation/order"
	"stampede/sql"
)

// Outcome is the result of one OrderReserved event in Postgres.
type Outcome struct {
	Event order.OrderReserved
	// Status and Reason are the order's in Postgres. They are empty if Err is set.
	Status order.Status
	Reason string
	// Fresh is true if this call recorded the order, and false if an earlier delivery did.
	Fresh bool
	// Err says why the event cannot be recorded: its sale is unknown, or ErrContradiction. The other
	// events of the call are recorded nevertheless.
	Err error
}

// Ledger writes orders to Postgres: their events, their rows and the counters of their sales, one batch
// per transaction. It is safe for concurrent use, also by several processes: an event has one effect
// however often it is recorded.
type Ledger struct {
	Reader
	outcomes  *Outcomes // nil to publish nothing
	onStatus  func(order.Status)
	onPayment func(order.PaymentState, order.PaymentReason)
	// line has the reports of payments that are to be decided.
	line *paymentLine
	// paced has sales with a pace (uuid.UUID), which record_fresh.sql leaves to record_orders.sql.
	paced *sync.Map
	// limitLocks is the SET that bounds how long a transaction waits for a lock. It is sent with the BEGIN.
	limitLocks string
}

// RecordTimeout bounds one try of a transaction, so that a server that hangs counts as down.
const RecordTimeout = 10 * time.Second

// lockWait bounds a transaction's wait for a lock. It is far longer than any transaction of Stampede
// lasts, and short enough for orders of other sales in the same batch.
const lockWait = 2 * time.Second

// New returns a Ledger on a migrated database.
func New(pool *pgxpool.Pool) *Ledger {
	return (&Ledger{
		Reader: Reader{pool}, onPayment: func(order.PaymentState, order.PaymentReason) {},
		line: newPaymentLine(), paced: new(sync.Map),
	}).WithLockTimeout(lockWait)
}

// WithLockTimeout sets how long a transaction waits for a lock.
func (l *Ledger) WithLockTimeout(d time.Duration) *Ledger {
	l.limitLocks = fmt.Sprintf("SET LOCAL lock_timeout = %d", d.Milliseconds())
	return l
}

// Record confirms the orders. It rejects those whose user has another live order in the sale, and voids
// those of an earlier epoch of their sale. The outcomes are in the order of the events.
//
// After an error none of the events is recorded, except when COMMIT itself failed; retries are safe in
// any case. If the sale's stock in Postgres does not hold the units, the error is errOversold; halving
// the batch finds the event.
func (l *Ledger) Record(ctx context.Context, events []order.OrderReserved) ([]Outcome, error) {
	return l.record(ctx, events, nil)
}

// Refuse records the orders as rejected for this reason, unless they were recorded before.
func (l *Ledger) Refuse(ctx context.Context, events []order.OrderReserved, reason string) ([]Outcome, error) {
	return l.record(ctx, events, &reason)
}

func (l *Ledger) record(ctx context.Context, events []order.OrderReserved, refusal *string) ([]Outcome, error) {
	if len(events) == 0 {
		return nil, nil
	}
	columns, rows := ColumnsOf(events)
	words, found, err := l.write(ctx, columns, refusal)
	if isWithoutMonth(err) {
		if _, err = l.pool.Exec(ctx, sql.LedgerMakeMonths, columns.Arguments()[1]); err == nil {
			words, found, err = l.write(ctx, columns, refusal)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("record %d orders: %w", len(events), TranslateError(err))
	}
	outcomes := make([]Outcome, len(events))
	for i, event := range events {
		outcomes[i] = newOutcome(event, words[rows[i]], found, refusal)
		if first := columns.firsts[rows[i]]; first != i {
			outcomes[i] = repeatedInBatch(outcomes[i], events[first])
		}
	}
	l.publishRecorded(outcomes, found)
	return outcomes, nil
}

// write runs the transaction, and a second one unless every event is new. It returns the word for every
// row of the columns, and the present state of orders that were recorded before.
func (l *Ledger) write(ctx context.Context, c *Columns, refusal *string) ([]string, map[uuid.UUID]order.Order, error) {
	conn, err := l.pool.Acquire(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errNoConnection, err)
	}
	defer conn.Release()
	if refusal == nil && !l.hasPaced(c) {
		err := inSpan(ctx, c, func(ctx context.Context) error { return l.confirmFresh(ctx, conn, c) })
		if err == nil {
			return slices.Repeat([]string{wordConfirmed}, len(c.orders)), nil, nil
		}
		rollBack(conn)
		if !isNotFresh(err) {
			return nil, nil, err
		}
	}
	var words []string
	var found map[uuid.UUID]order.Order
	err = inSpan(ctx, c, func(ctx context.Context) (err error) {
		words, found, err = l.recordOn(ctx, conn, c, refusal)
		return err
	})
	if err != nil {
		rollBack(conn)
	}
	return words, found, err
}

// confirmFresh records and confirms orders that are all new, in one round trip. After an error the caller
// rolls the transaction back.
func (l *Ledger) confirmFresh(ctx context.Context, conn *pgxpool.Conn, c *Columns) error {
	batch := &pgx.Batch{}
	l.queueBegin(batch)
	batch.Queue(sql.LedgerRecordFresh, c.Arguments()...)
	sold := c.sumUnits(func(int) bool { return true })
	traced := c.tracesBySale(func(int) bool { return true })
	queueTraces(batch, traced)
	queueEnd(batch, sold)
	answers := conn.SendBatch(ctx, batch)
	err := readBegin(answers)
	for range 1 + len(traced) {
		if err == nil {
			err = readAnswer(answers)
		}
	}
	if err == nil {
		err = finish(answers, sold)
	}
	return closed(answers, err)
}

// recordOn records events of any kind, in two round trips.
func (l *Ledger) recordOn(
	ctx context.Context, conn *pgxpool.Conn, c *Columns, refusal *string,
) ([]string, map[uuid.UUID]order.Order, error) {
	begin := &pgx.Batch{}
	l.queueBegin(begin)
	begin.Queue(sql.LedgerLockTurns, array[idCell](c.sales))
	begin.Queue(sql.LedgerRecordOrders, append(c.Arguments(), refusal)...)
	answers := conn.SendBatch(ctx, begin)
	words, err := l.readWords(answers, len(c.orders))
	if err := closed(answers, err); err != nil {
		return nil, nil, err
	}

	batch := &pgx.Batch{}
	refused, repeated := c.ordersWith(words, wordRejected, wordVoided), c.ordersWith(words, wordRecorded, wordWrongItems)
	for _, group := range refused {
		batch.Queue(sql.LedgerLogRefusals, group.sale, group.orders)
	}
	for _, group := range repeated {
		batch.Queue(sql.LedgerFindOrders, group.sale, group.orders)
	}
	traced := c.tracesBySale(func(row int) bool { return isFresh(words[row]) })
	sold := c.sumUnits(func(row int) bool { return words[row] == wordConfirmed })
	queueTraces(batch, traced)
	queueEnd(batch, sold)
	answers = conn.SendBatch(ctx, batch)
	for range refused {
		if err := readAnswer(answers); err != nil {
			return nil, nil, closed(answers, err)
		}
	}
	found := map[uuid.UUID]order.Order{}
	for range repeated {
		if err := readOrders(answers, found); err != nil {
			return nil, nil, closed(answers, err)
		}
	}
	for range traced {
		if err := readAnswer(answers); err != nil {
			return nil, nil, closed(answers, err)
		}
	}
	return words, found, closed(answers, finish(answers, sold))
}

// beginRecording sets read committed, whatever the server's default is: find_orders must see what a
// concurrent transaction committed while record_orders waited for it.
const beginRecording = "BEGIN ISOLATION LEVEL READ COMMITTED"

// queueBegin queues the first statements of every transaction.
func (l *Ledger) queueBegin(batch *pgx.Batch) {
	batch.Queue(beginRecording)
	batch.Queue(l.limitLocks)
}

// queueEnd queues the last statements of every transaction: all items of sales, and then all sales.
func queueEnd(batch *pgx.Batch, sold []saleUnits) {
	for _, sale := range sold {
		if sale.items != nil {
			batch.Queue(sql.LedgerAddSoldItems, sale.id, order.MakeLines(sale.items), 1)
		}
	}
	for _, sale := range sold {
		batch.Queue(sql.LedgerAddSold, sale.id, sale.units, sale.lastSequence, sale.epoch)
	}
	batch.Queue("COMMIT")
}

func readAnswer(answers pgx.BatchResults) error {
	_, err := answers.Exec()
	return err
}

// readBegin reads the answers to queueBegin.
func readBegin(answers pgx.BatchResults) error {
	if err := readAnswer(answers); err != nil {
		return err
	}
	return readAnswer(answers)
}

// closed closes the answers. Close repeats the error of the statement that failed.
func closed(answers pgx.BatchResults, err error) error {
	if closeErr := answers.Close(); err == nil {
		return closeErr
	}
	return err
}

// finish reads the answers to queueEnd. Its error is a *saleError if the update of a sale's rows failed.
func finish(answers pgx.BatchResults, sold []saleUnits) error {
	for _, sale := range sold {
		if sale.items == nil {
			continue
		}
		if err := readAnswer(answers); err != nil {
			return &saleError{sale.id, err}
		}
	}
	for _, sale := range sold {
		if err := readAnswer(answers); err != nil {
			return &saleError{sale.id, err}
		}
	}
	tag, err := answers.Exec()
	if err == nil && tag.String() != "COMMIT" {
		err = fmt.Errorf("commit answered %s", tag)
	}
	return err
}

// The words of ledger/record_orders.sql.
const (
	wordConfirmed   = "confirmed"
	wordRejected    = "rejected"
	wordVoided      = "voided"
	wordRecorded    = "recorded"
	wordUnknownSale = "unknown-sale"
	wordWrongItems  = "wrong-items"
	wordArchived    = "archived"
)

// hasPaced reports whether a sale of the events is known to have a pace.
func (l *Ledger) hasPaced(c *Columns) bool {
	return slices.ContainsFunc(c.sales, func(sale idCell) bool {
		_, paced := l.paced.Load(uuid.UUID(sale))
		return paced
	})
}

func (l *Ledger) readWords(answers pgx.BatchResults, n int) ([]string, error) {
	if err := readBegin(answers); err != nil {
		return nil, err
	}
	rows, _ := answers.Query() // rows carry the error
	paced, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, err
	}
	for _, sale := range paced {
		l.paced.Store(sale, nil)
	}
	rows, err = answers.Query()
	if err != nil {
		return nil, err
	}
	words := make([]string, n)
	var row int64
	var word string
	_, err = pgx.ForEachRow(rows, []any{&row, &word}, func() error {
		words[row-1] = word
		return nil
	})
	return words, err
}

// readOrders adds the orders of the next answer to found.
func readOrders(answers pgx.BatchResults, found map[uuid.UUID]order.Order) error {
	rows, _ := answers.Query() // rows carry the error
	orders, err := pgx.CollectRows(rows, scanOrder)
	for _, o := range orders {
		found[o.ID] = o
	}
	return err
}

// orderRow is an order as the ledger's queries return it.
type orderRow struct {
	ID               uuid.UUID
	SaleID           uuid.UUID
	UserID           string
	Quantity         int64
	Lines            zeronull.Text
	Items            zeronull.Text
	Status           order.Status
	Version          int
	ReservedAt       time.Time
	UpdatedAt        time.Time
	ExpiresAt        zeronull.Timestamptz
	PayFrom          zeronull.Timestamptz
	Amount           zeronull.Int8
	Currency         zeronull.Text
	PaymentReference string
	Reason           string
	EntryFor         zeronull.UUID
	OffersOnly       bool // of the sale
	KeyFingerprint   string
}

func scanOrder(row pgx.CollectableRow) (order.Order, error) {
	r, err := pgx.RowToStructByName[orderRow](row)
	return r.order(), err
}

func (r *orderRow) order() order.Order {
	o := order.Order{
		ID: r.ID, SaleID: r.SaleID, UserID: r.UserID, Quantity: r.Quantity, Lines: order.Lines(r.Lines),
		Items: order.Items(r.Items), Status: r.Status, Version: r.Version, ReservedAt: r.ReservedAt.UTC(),
		UpdatedAt: r.UpdatedAt.UTC(), ExpiresAt: time.Time(r.ExpiresAt),
		PayFrom: time.Time(r.PayFrom), Amount: int64(r.Amount), Currency: string(r.Currency),
		PaymentReference: r.PaymentReference, Reason: r.Reason, EntryFor: uuid.UUID(r.EntryFor),
		Kind: order.KindOf(uuid.UUID(r.EntryFor), r.OffersOnly, r.KeyFingerprint),
	}
	for _, at := range []*time.Time{&o.ExpiresAt, &o.PayFrom} {
		if !at.IsZero() {
			*at = at.UTC()
		}
	}
	return o
}

func newOutcome(event order.OrderReserved, word string, found map[uuid.UUID]order.Order, refusal *string) Outcome {
	out := Outcome{Event: event}
	switch word {
	case wordConfirmed:
		out.Fresh, out.Status = true, order.StatusConfirmed
	case wordRejected:
		out.Fresh, out.Status, out.Reason = true, order.StatusRejected, order.RejectedAlreadyPurchased
		if refusal != nil {
			out.Reason = *refusal
		}
	case wordVoided:
		out.Fresh, out.Status, out.Reason = true, order.StatusVoided, order.VoidedSaleRebuilt
	case wordRecorded, wordWrongItems:
		o, ok := found[event.OrderID]
		switch {
		case !ok && word == wordWrongItems:
			out.Err = fmt.Errorf("%w: %s of order %s of sale %s", errWrongItems,
				order.AppendUnits(nil, event.Quantity, event.Lines), event.OrderID, event.SaleID)
		case !ok:
			out.Err = fmt.Errorf("%w: order %s has events but no row", ErrContradiction, event.OrderID)
		case o.SaleID != event.SaleID || o.UserID != event.UserID || o.Quantity != event.Quantity || o.Lines != event.Lines:
			out.Err = contradiction(event.OrderID, o.SaleID, o.UserID, o.Quantity, o.Lines)
		default:
			out.Status, out.Reason = o.Status, o.Reason
		}
	case wordArchived:
		out.Err = fmt.Errorf("order %s of sale %s: %w", event.OrderID, event.SaleID, order.ErrArchived)
	default: // wordUnknownSale
		out.Err = fmt.Errorf("%w: %s of order %s", errUnknownSale, event.SaleID, event.OrderID)
	}
	return out
}

// repeatedInBatch returns the outcome of an event whose order occurs earlier in the same batch. Only one
// of the two can be fresh, and only if they agree.
func repeatedInBatch(out Outcome, first order.OrderReserved) Outcome {
	out.Fresh = false
	if out.Err == nil && (first.SaleID != out.Event.SaleID || first.UserID != out.Event.UserID ||
		first.Quantity != out.Event.Quantity || first.Lines != out.Event.Lines) {
		return Outcome{Event: out.Event, Err: contradiction(
			out.Event.OrderID, first.SaleID, first.UserID, first.Quantity, first.Lines)}
	}
	return out
}

func contradiction(id, sale uuid.UUID, user string, quantity int64, lines order.Lines) error {
	return fmt.Errorf("%w: order %s was recorded for sale=%s user=%s quantity=%s", ErrContradiction, id, sale, user,
		order.AppendUnits(nil, quantity, lines))
}

// rollBack makes the connection usable again. It has its own timeout, because the caller's context may
// have ended; the pool discards a connection on which it fails.
func rollBack(conn *pgxpool.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() != 'I' {
		_, _ = conn.Exec(ctx, "ROLLBACK")
	}
}
