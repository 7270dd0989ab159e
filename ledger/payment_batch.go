package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/crashpoint"
	"stampede/reservation/order"
	"stampede/sql"
)

// report is one report of money, or one payment that waits, in a batch.
type report struct {
	order.Money
	// user is the buyer who claims to have paid; nil for the shop, whose word counts.
	user *string
	// arrived is when it came, from which on the money is in time.
	arrived time.Time
	// trace is the span of the call, as W3C Trace Context has it.
	trace string
	// blind keeps the money without a look at its order.
	blind bool
	// missing is why the refund of a payment that waits is due if there is no order; empty to go on waiting.
	missing order.PaymentReason
	// waiting is true for a payment that waits: it is decided with its order, and reported nothing.
	waiting bool

	// kept is the reference of the payment that keeps what it says. That payment and the order are as they are afterwards;
	// the order is zero if there is none.
	kept    string
	payment order.Payment
	order   order.Order
	// err is why a claim is refused.
	err error
	// isLocked is true if its order is locked by another transaction: nothing was done.
	isLocked bool

	// Of a report in a line (paymentLine): done is closed when it is decided, or isAlone says that its caller is to
	// decide about it alone. lead gets a value if its caller is to lead the next transaction.
	done, lead chan struct{}
	isAlone    bool
}

// claimsMax bounds the claims of a buyer that are kept of one order and that it does not take.
const claimsMax = 5

// overdueFor reports whether the time to pay was over when money came, so long ago.
func (o *lockedOrder) overdueFor(ago time.Duration) bool { return o.overdue && o.late >= ago }

// paymentBatch is a transaction that decides about several reports.
type paymentBatch struct {
	tx pgx.Tx
	// wait waits for orders that others have locked.
	wait   bool
	orders map[uuid.UUID]*lockedOrder
	// locked are orders that exist and were not locked.
	locked map[uuid.UUID]bool
	// payments are the present states by reference, and archived those that were found in archives.
	payments, archived map[string]*order.Payment
	// claims is how many claims each order has that it did not take.
	claims map[uuid.UUID]int

	// events are those to write, and paid the orders that change, which were as in before.
	events []*order.Payment
	before []order.Order
	paid   []*lockedOrder
	traces []string
}

// decideTogether decides about the reports, and about all money that waits for their orders, in one transaction, and
// sets what became of each. It leaves out those whose order another transaction has locked, unless it is to wait.
//
// Money that waits for an order comes first: it was reported before.
func (l *Ledger) decideTogether(ctx context.Context, reports []*report, wait bool) error {
	var b *paymentBatch
	archived := map[string]*order.Payment{}
	err := l.untilRead(ctx, func(tx pgx.Tx) error {
		b = &paymentBatch{
			archived: archived,
			tx:       tx, wait: wait, orders: map[uuid.UUID]*lockedOrder{}, locked: map[uuid.UUID]bool{},
			payments: map[string]*order.Payment{}, claims: map[uuid.UUID]int{},
		}
		waiting, err := b.read(ctx, reports)
		if err != nil {
			return err
		}
		for i := range waiting {
			b.decideWaiting(waiting[i])
		}
		for _, r := range reports {
			b.decide(r)
		}
		return b.write(ctx)
	})
	switch {
	case err != nil && errors.Is(err, errReadAgain):
		return err
	case FaultOf(err) == BadData, errors.Is(err, errNotLocked):
		return fmt.Errorf("%w: %w", order.ErrDamaged, err)
	case err != nil:
		return err
	}
	crashpoint.Hit(crashpoint.AfterPayment)
	for _, p := range b.events {
		if b.payments[p.Reference] == p { // not what was decided at once
			l.onPayment(p.State, p.Reason)
		}
	}
	for _, o := range b.paid {
		if l.onStatus != nil {
			l.onStatus(o.Status)
		}
	}
	if len(b.paid) > 0 {
		l.publishChanged(b.before, b.paid[0].Order)
	}
	for _, r := range reports {
		if p := b.payments[r.kept]; p != nil {
			r.payment = *p
		}
		if o := b.orders[r.OrderID]; o != nil {
			r.order = o.Order
		}
	}
	return nil
}

// read locks the orders of the reports, and then reads their payments. It returns the payments that wait for them.
func (b *paymentBatch) read(ctx context.Context, reports []*report) (waiting []*report, err error) {
	var ids []uuid.UUID
	var references []string
	for _, r := range reports {
		references = append(references, r.Reference)
		if r.user != nil {
			references = append(references, r.KeyOfClaim())
		}
		if r.OrderID != uuid.Nil && !r.blind {
			ids = append(ids, r.OrderID)
		}
	}
	// In one order, so that two batches do not wait for each other.
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	ids = slices.Compact(ids)
	known := knownToAll.sales(ids)
	batch := &pgx.Batch{}
	b.queueLocks(batch, known)
	batch.Queue(sql.PaymentFind, references) // after the locks: what it reads does not change then
	answers := b.tx.SendBatch(ctx, batch)
	if err = b.readLocks(answers, known); err == nil {
		rows, _ := answers.Query() // rows carry the error
		err = b.readPayments(rows)
	}
	if err = closed(answers, err); err != nil {
		return nil, err
	}
	if missing := b.missing(ids); len(missing) > 0 {
		// Their sales are not known to this process, or they are not in Postgres, or others have locked them.
		if err := b.lockMissing(ctx, missing, known); err != nil {
			return nil, err
		}
		if len(b.missing(missing)) < len(missing) {
			rows, _ := b.tx.Query(ctx, sql.PaymentFind, references) // rows carry the error
			if err := b.readPayments(rows); err != nil {
				return nil, err
			}
		}
	}
	if waiting, err = b.readWaiting(ctx); err != nil {
		return nil, err
	}
	for reference, p := range b.archived {
		b.payments[reference] = p
	}
	return waiting, b.readOthers(ctx, append(slices.Clone(waiting), reports...))
}

func (b *paymentBatch) missing(ids []uuid.UUID) []uuid.UUID {
	return slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool { return b.orders[id] != nil })
}

func (b *paymentBatch) queueLocks(batch *pgx.Batch, groups ordersBySale) {
	query := lockFreeOrders
	if b.wait {
		query = lockOrders
	}
	for _, group := range groups {
		batch.Queue(query, group.sale, group.orders, nil)
	}
}

func (b *paymentBatch) readLocks(answers pgx.BatchResults, groups ordersBySale) error {
	for range groups {
		rows, _ := answers.Query() // rows carry the error
		orders, err := pgx.CollectRows(rows, scanLocked)
		if err != nil {
			return err
		}
		for _, o := range orders {
			b.orders[o.ID] = &o
			knownToAll.add(o.SaleID)
		}
	}
	return nil
}

// lockMissing locks orders of sales that are not among the known ones, and notes those that others have locked.
func (b *paymentBatch) lockMissing(ctx context.Context, ids []uuid.UUID, known ordersBySale) error {
	others, err := findOtherSales(ctx, b.tx, ids, known)
	if err != nil {
		return err
	}
	batch := &pgx.Batch{}
	b.queueLocks(batch, others)
	var exist ordersBySale
	if !b.wait {
		for _, group := range slices.Concat(known, others) {
			for _, id := range group.orders {
				if b.orders[id] == nil {
					exist.add(group.sale, id)
				}
			}
		}
		for _, group := range exist {
			batch.Queue(sql.LedgerFindOrders, group.sale, group.orders)
		}
	}
	if batch.Len() == 0 {
		return nil
	}
	answers := b.tx.SendBatch(ctx, batch)
	err = b.readLocks(answers, others)
	found := map[uuid.UUID]order.Order{}
	for range exist {
		if err == nil {
			err = readOrders(answers, found)
		}
	}
	for id := range found {
		b.locked[id] = b.orders[id] == nil
	}
	return closed(answers, err)
}

// readWaiting reads the payments that wait for the orders.
func (b *paymentBatch) readWaiting(ctx context.Context) (waiting []*report, err error) {
	var ids []uuid.UUID
	for id, o := range b.orders {
		if o.moneyWaits {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, _ := b.tx.Query(ctx, sql.PaymentWaitingFor, ids) // rows carry the error
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		r, err := pgx.RowToStructByName[struct {
			paymentRow
			Waits float64
		}](row)
		p := r.payment()
		b.payments[p.Reference] = &p
		waits := time.Duration(r.Waits * float64(time.Second))
		waiting = append(waiting, &report{Money: p.Money, waiting: true, arrived: time.Now().Add(-waits)})
		return struct{}{}, err
	})
	return waiting, err
}

func (b *paymentBatch) readPayments(rows pgx.Rows) error {
	found, err := pgx.CollectRows(rows, scanPayment)
	for _, p := range found {
		b.payments[p.Reference] = &p
	}
	return err
}

// readOthers reads what few reports need: the claim with which the order of a report was paid, the report that one
// contradicts as this one does, and how many claims an order has.
func (b *paymentBatch) readOthers(ctx context.Context, reports []*report) error {
	var references []string
	var claimed []uuid.UUID
	for _, r := range reports {
		if o := b.orders[r.OrderID]; o != nil && o.PaymentReference == r.Reference {
			references = append(references, r.KeyOfClaim())
		}
		if first := b.payments[r.Reference]; first != nil && first.Contradicts(&r.Money) != "" {
			references = append(references, r.KeyOfContradiction())
		}
		if r.user != nil {
			claimed = append(claimed, r.OrderID)
		}
	}
	if len(references) > 0 {
		rows, _ := b.tx.Query(ctx, sql.PaymentFind, references) // rows carry the error
		if err := b.readPayments(rows); err != nil {
			return err
		}
	}
	if len(claimed) > 0 {
		rows, _ := b.tx.Query(ctx, sql.PaymentClaims, claimed) // rows carry the error
		var id uuid.UUID
		var n int
		_, err := pgx.ForEachRow(rows, []any{&id, &n}, func() error { b.claims[id] = n; return nil })
		return err
	}
	return nil
}

// decideWaiting decides about a payment that waits and whose order is locked, or is missing.
func (b *paymentBatch) decideWaiting(r *report) {
	if p := b.payments[r.Reference]; p != nil && p.State == order.PaymentWaiting {
		b.decideMoney(r)
	}
}

// decide decides about a report.
func (b *paymentBatch) decide(r *report) {
	r.isLocked, r.kept, r.err = b.locked[r.OrderID], r.Reference, nil
	first := b.payments[r.Reference]
	switch {
	case r.isLocked:
	case r.user != nil:
		r.err = b.decideClaim(r)
	case r.waiting:
		b.decideWaiting(r)
	case first == nil, r.Mends(first):
		b.add(r.Reference, &r.Money, order.PaymentWaiting, "")
		b.decideMoney(r)
	default:
		b.decideRepeat(r, first)
	}
}

// decideRepeat keeps a report whose reference was reported before if it says something else.
func (b *paymentBatch) decideRepeat(r *report, first *order.Payment) {
	why := first.Contradicts(&r.Money)
	if why == "" {
		return
	}
	if r.kept = r.KeyOfContradiction(); b.payments[r.kept] == nil {
		b.add(r.kept, &r.Money, order.PaymentWaiting, "")
		b.add(r.kept, nil, order.PaymentUnclear, why)
	}
}

// decideMoney decides about money whose report is written: it waits, or its order takes it, or it does not.
func (b *paymentBatch) decideMoney(r *report) {
	o := b.orders[r.OrderID]
	if claim := b.payments[r.KeyOfClaim()]; o != nil && claim != nil && claim.State != order.PaymentClaimed {
		b.replaceClaim(r, claim)
		return
	}
	switch {
	case r.Unclear != "":
		b.add(r.Reference, nil, order.PaymentUnclear, r.Unclear)
	case r.OrderID == uuid.Nil:
		b.add(r.Reference, nil, order.PaymentRefundDue, order.RefundOrderNotFound)
	case o == nil && r.missing != "":
		b.add(r.Reference, nil, order.PaymentRefundDue, r.missing)
	case o == nil:
	default:
		if why := b.pay(r, o, r.Money); why != "" {
			b.add(r.Reference, nil, order.PaymentRefundDue, why)
		} else {
			b.add(r.Reference, nil, order.PaymentSettled, "")
		}
	}
}

// pay pays the order with the money, or returns why it cannot.
func (b *paymentBatch) pay(r *report, o *lockedOrder, m order.Money) order.PaymentReason {
	if o.EntryFor != uuid.Nil {
		return order.RefundNothingToPay
	}
	paid, why := o.DecidePayment(m, o.overdueFor(time.Since(r.arrived)))
	if why == "" {
		paid.PaymentReference = m.Reference
		b.before, b.paid, b.traces = append(b.before, o.Order), append(b.paid, o), append(b.traces, r.trace)
		o.Order = paid
	}
	return why
}

// replaceClaim has the shop's report take the place of its buyer's claim, which is no money from then on. Money that
// differs from what its order was paid with is for a person to look at.
func (b *paymentBatch) replaceClaim(r *report, claim *order.Payment) {
	if claim.State == order.PaymentSettled {
		why := claim.Contradicts(&r.Money)
		if why == "" {
			b.add(r.Reference, nil, order.PaymentSettled, "")
			b.add(claim.Reference, nil, order.PaymentClaimed, "")
			return
		}
		b.add(r.Reference, nil, order.PaymentUnclear, why)
		return
	}
	due := *claim
	b.add(claim.Reference, nil, order.PaymentClaimed, "")
	b.add(r.Reference, nil, order.PaymentRefundDue, due.Reason).Operator = due.Operator
	if due.State == order.PaymentRefunded {
		refunded := b.add(r.Reference, nil, order.PaymentRefunded, due.Reason)
		refunded.RefundReference, refunded.Operator = due.RefundReference, due.Operator
	}
}

// decideClaim decides about what a buyer says, and returns why it is refused. The shop may have reported the same money
// before.
func (b *paymentBatch) decideClaim(r *report) error {
	o := b.orders[r.OrderID]
	if o == nil || o.UserID != *r.user {
		return order.ErrNotFound
	}
	if o.Status == order.StatusPaid && o.PaymentReference == r.Reference {
		return nil
	}
	if p := b.payments[r.Reference]; p != nil && p.OrderID == r.OrderID {
		return o.Refusal(p.Reason)
	}
	m := r.Money
	m.Amount, m.Currency = o.Amount, o.Currency
	why := b.pay(r, o, m)
	r.kept = r.KeyOfClaim()
	switch {
	case why == "":
		if b.payments[r.kept] == nil { // else a later call of the same buyer was decided first
			b.add(r.kept, &m, order.PaymentWaiting, "")
		}
		b.add(r.kept, nil, order.PaymentSettled, "")
		return nil
	case b.payments[r.kept] == nil && b.claims[r.OrderID] < claimsMax:
		b.claims[r.OrderID]++
		b.add(r.kept, &m, order.PaymentWaiting, "")
		b.add(r.kept, nil, order.PaymentClaimed, why)
	}
	return o.Refusal(why)
}

// add adds the event that brings the payment to a state. m is what was reported; nil for what its payment has.
func (b *paymentBatch) add(
	reference string, m *order.Money, state order.PaymentState, why order.PaymentReason,
) *order.Payment {
	p := &order.Payment{}
	if before := b.payments[reference]; before != nil {
		*p = *before
	}
	if m != nil {
		p.Money = *m
		p.Money.Reference = reference
	}
	if o := b.orders[p.OrderID]; o != nil {
		p.SaleID = o.SaleID
	}
	p.State, p.Reason = state, why
	p.Version++
	b.payments[reference] = p
	b.events = append(b.events, p)
	return p
}

// write writes what was decided.
func (b *paymentBatch) write(ctx context.Context) error {
	if len(b.events) == 0 {
		return nil
	}
	crashpoint.Hit(crashpoint.BeforePayment)
	batch := &pgx.Batch{}
	batch.Queue(sql.PaymentAddEvents, paymentColumns(b.events)...)
	queueArchived(batch, b.events)
	groups := b.paidBySale()
	for _, g := range groups {
		batch.Queue(sql.LedgerChangeOrders, g.ids, g.versions, order.StatusPaid, order.EventPaid, g.references, false, g.sale,
			nil, nil)
	}
	for i, o := range b.paid {
		if b.traces[i] != "" {
			batch.Queue(sql.LedgerNoteTraces, o.SaleID, []uuid.UUID{o.ID}, []string{b.traces[i]}, o.Version)
		}
	}
	answers := b.tx.SendBatch(ctx, batch)
	rows, _ := answers.Query() // rows carry the error
	err := readPositions(rows, b.events)
	if err == nil {
		rows, _ = answers.Query() // rows carry the error
		err = b.readArchived(rows)
	}
	crashpoint.Hit(crashpoint.PaymentInserted)
	for _, g := range groups {
		var changed int
		var at time.Time
		if err == nil {
			err = answers.QueryRow().Scan(&changed, &at)
		}
		if err == nil && changed != len(g.ids) {
			err = fmt.Errorf("%w: %d of %d are unchanged since they were read", errNotLocked, changed, len(g.ids))
		}
		for _, o := range b.paid {
			o.UpdatedAt = at.UTC()
		}
	}
	crashpoint.Hit(crashpoint.BeforePaymentCommit)
	return closed(answers, err)
}

// paidOrders are orders of one sale that are paid, as columns.
type paidOrders struct {
	sale       uuid.UUID
	ids        []uuid.UUID
	versions   []int
	references []string
}

func (b *paymentBatch) paidBySale() (groups []paidOrders) {
	for i, o := range b.before {
		at := slices.IndexFunc(groups, func(g paidOrders) bool { return g.sale == o.SaleID })
		if at < 0 {
			at = len(groups)
			groups = append(groups, paidOrders{sale: o.SaleID})
		}
		g := &groups[at]
		g.ids, g.versions = append(g.ids, o.ID), append(g.versions, o.Version)
		g.references = append(g.references, b.paid[i].PaymentReference)
	}
	return groups
}
