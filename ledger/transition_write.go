package ledger

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file writes the transitions that order/transition.go decides.

// Cancel cancels the user's order and returns it. Retries change nothing. Its units are on sale again,
// and its user may buy again, as soon as a worker has released the units in Redis. An entry of a draw can be cancelled
// until the entries close, although there is nothing to pay: its entrant leaves.
//
// The error is order.ErrNotFound, also for another user's order; order.ErrExpired once the deadline has passed; wraps
// order.ErrIllegalTransition or order.ErrDamaged; or is one of Postgres.
func (l *Ledger) Cancel(ctx context.Context, o uuid.UUID, user string) (order.Order, error) {
	cancelled, err := l.change(ctx, o, change{
		event: order.EventCancelled, user: &user, decide: order.Order.Cancelled,
	})
	if err != nil {
		return order.Order{}, fmt.Errorf("cancel order=%s: %w", o, err)
	}
	return cancelled.Order, nil
}

// Withdraw cancels an order of any user for an operator, and returns it. Other than Cancel, it also cancels orders that
// are paid, and confirmed ones with nothing to pay. The event has the operator and the reason, and the refund of
// its payment is due from then on. Retries change nothing, and an order that its buyer has cancelled stays as it is.
//
// The error is an *order.InvalidError for the reason, order.ErrNotFound, order.ErrArchived, wraps
// order.ErrIllegalTransition or order.ErrDamaged, or is one of Postgres.
func (l *Ledger) Withdraw(ctx context.Context, o uuid.UUID, reason, operator string) (order.Placed, error) {
	if err := order.ValidateReason(reason); err != nil {
		return order.Placed{}, err
	}
	cancelled, err := l.change(ctx, o, change{
		event: order.EventCancelled, reason: &reason, operator: &operator,
		decide: func(o order.Order, _ bool) (order.Order, bool, error) { return o.Withdrawn() },
	})
	if errors.Is(err, order.ErrNotFound) {
		err = l.missing(ctx, o)
	}
	if err != nil {
		return order.Placed{}, fmt.Errorf("cancel order=%s for operator=%s: %w", o, operator, err)
	}
	return cancelled, nil
}

// change is an event of one order.
type change struct {
	event order.EventType
	// decide is a rule of order/transition.go: it returns the order after the event.
	decide func(o order.Order, overdue bool) (next order.Order, changed bool, err error)
	// user is whose order it must be; nil for anybody's.
	user *string
	// reason and operator are set for an operator's cancellation.
	reason, operator *string
}

// errMoneyWaits is returned for a change of an order for which money waits, which comes first.
var errMoneyWaits = errors.New("money for the order waits for a decision")

// change applies one event to an order: it reads, decides and writes in one transaction that locks the row. Money that
// was reported before is decided about first.
func (l *Ledger) change(ctx context.Context, id uuid.UUID, c change) (next order.Placed, err error) {
	next, err = l.changeOnce(ctx, id, c)
	for ; errors.Is(err, errMoneyWaits); next, err = l.changeOnce(ctx, id, c) {
		if err := l.decideTogether(ctx, []*report{{Money: order.Money{OrderID: id}, waiting: true}}, true); err != nil {
			return next, err
		}
	}
	return next, err
}

func (l *Ledger) changeOnce(ctx context.Context, id uuid.UUID, c change) (next order.Placed, err error) {
	var changed []order.Order
	var refund *order.Payment
	err = l.untilRead(ctx, func(tx pgx.Tx) error {
		changed, refund = nil, nil
		o, err := l.lockOrder(ctx, tx, id, c.user)
		if err != nil {
			return err
		}
		if next = o.Placed; o.moneyWaits {
			return errMoneyWaits
		}
		var isChange bool
		if next.Order, isChange, err = c.decide(o.Order, o.overdue); err != nil || !isChange {
			return err
		}
		changed = []order.Order{o.Order}
		if next.UpdatedAt, err = writeChange(ctx, tx, c, changed, next.Order); err != nil {
			return err
		}
		if o.EntryFor != uuid.Nil && !next.Status.Live() {
			leaves := c.operator == nil && o.ExpiresAt.IsZero()
			if err := entryCancelled(ctx, tx, o.Order, leaves); err != nil {
				return err
			}
		}
		if o.Status == order.StatusPaid { // by an operator
			p, err := findPaying(ctx, tx, o.Order)
			if err != nil {
				return err
			}
			if p.State == order.PaymentSettled { // else the money is back, or the payer asks for it
				p.State, p.Reason, p.Operator = order.PaymentRefundDue, order.RefundOrderCancelled, *c.operator
				p.Version++
				refund = &p
				if err := addPaymentEvents(ctx, tx, []*order.Payment{refund}); err != nil {
					return err
				}
			}
		}
		return noteTrace(ctx, tx, next.Order)
	})
	if err == nil && refund != nil {
		l.onPayment(refund.State, refund.Reason)
	}
	return next, l.announce(changed, next.Order, err)
}

// entryCancelled looks, when nothing is waited for any more, whether an entry was cancelled in time for the list of its
// draw, which has those whose time of change is after the end. An entrant who leaves too late, or leaves a waiting list
// here, is refused.
func entryCancelled(ctx context.Context, tx pgx.Tx, entry order.Order, leaves bool) error {
	var over, beganBefore bool
	err := tx.QueryRow(ctx, sql.LedgerEntriesOver, entry.SaleID).Scan(&over, &beganBefore)
	isOther := errors.Is(err, pgx.ErrNoRows) // of no draw
	switch {
	case leaves && (isOther || over):
		return &order.TransitionError{Status: entry.Status, Event: order.EventCancelled}
	case isOther:
		return nil
	case err == nil && over && beganBefore:
		return fmt.Errorf("%w: the entries have closed meanwhile", errReadAgain)
	}
	return err
}

// announce tells of the orders that a transaction has changed to next, and returns its error as that of a change.
func (l *Ledger) announce(changed []order.Order, next order.Order, err error) error {
	switch {
	case err == nil:
		if l.onStatus != nil && len(changed) > 0 {
			l.onStatus(next.Status)
		}
		l.publishChanged(changed, next)
	case FaultOf(err) == BadData, errors.Is(err, errNotLocked):
		err = fmt.Errorf("%w: %w", order.ErrDamaged, err)
	}
	return err
}

// inTransaction runs f in a transaction, and commits unless f fails. It is read committed, whatever the
// server's default is: after a wait for a row's lock, f must see what was committed meanwhile.
func (l *Ledger) inTransaction(ctx context.Context, f func(pgx.Tx) error) error {
	return pg.InTransaction(ctx, l.pool, pgx.TxOptions{BeginQuery: beginRecording + "; " + l.limitLocks}, f)
}

// LockOrder locks and returns the order of the user, or of any user if that is nil, and reports whether its deadline
// has passed.
func (l *Ledger) LockOrder(
	ctx context.Context, tx pgx.Tx, id uuid.UUID, user *string,
) (o order.Placed, overdue bool, err error) {
	locked, err := l.lockOrder(ctx, tx, id, user)
	return locked.Placed, locked.overdue, err
}

func (l *Ledger) lockOrder(ctx context.Context, tx pgx.Tx, id uuid.UUID, user *string) (o lockedOrder, err error) {
	known := knownToAll.sales([]uuid.UUID{id})
	for _, group := range known {
		if o, err = lockOrderIn(ctx, tx, group.sale, id, user); !errors.Is(err, order.ErrNotFound) {
			return o, err
		}
	}
	others, err := findOtherSales(ctx, tx, []uuid.UUID{id}, known)
	if err != nil {
		return lockedOrder{}, err
	}
	for _, group := range others {
		if o, err = lockOrderIn(ctx, tx, group.sale, id, user); !errors.Is(err, order.ErrNotFound) {
			knownToAll.add(group.sale)
			return o, err
		}
	}
	return lockedOrder{}, order.ErrNotFound
}

func lockOrderIn(
	ctx context.Context, tx pgx.Tx, sale, id uuid.UUID, user *string,
) (o lockedOrder, err error) {
	rows, _ := tx.Query(ctx, lockOrders, sale, []uuid.UUID{id}, user) // rows carry the error
	o, err = pgx.CollectExactlyOneRow(rows, scanLocked)
	if errors.Is(err, pgx.ErrNoRows) {
		err = order.ErrNotFound
	}
	return o, err
}

// lockedOrder is an order whose row the transaction has locked.
type lockedOrder struct {
	order.Placed
	overdue, moneyWaits bool
	// late is since when the time to pay of an overdue order is over, by the clock of deadlines.
	late time.Duration
}

// The statements that lock orders, and wait for those that others have locked, or leave them out.
var (
	lockOrders     = strings.ReplaceAll(sql.LedgerLockOrders, "{{locked}}", "")
	lockFreeOrders = strings.ReplaceAll(sql.LedgerLockOrders, "{{locked}}", "SKIP LOCKED")
)

func scanLocked(row pgx.CollectableRow) (lockedOrder, error) {
	r, err := pgx.RowToStructByName[struct {
		placedRow
		Late       *float64
		MoneyWaits bool
	}](row)
	o := lockedOrder{Placed: r.placed(), overdue: r.Late != nil, moneyWaits: r.MoneyWaits}
	if o.overdue {
		o.late = time.Duration(*r.Late * float64(time.Second))
	}
	return o, err
}

// errNotLocked is returned when an order was changed while another transaction had its row locked, or by hand: the
// version of its row is not that of its last event.
var errNotLocked = errors.New("an order was changed without its lock, or without its log")

// writeChange writes the event of these orders of one sale, given as they were read, which all change to next. It
// returns the time of the change.
func writeChange(
	ctx context.Context, tx pgx.Tx, c change, orders []order.Order, next order.Order,
) (at time.Time, err error) {
	ids, versions := make([]uuid.UUID, len(orders)), make([]int, len(orders))
	references := make([]zeronull.Text, len(orders)) // of their payments
	for i, o := range orders {
		ids[i], versions[i], references[i] = o.ID, o.Version, zeronull.Text(next.PaymentReference)
	}
	released := !next.Status.Live()
	var changed int
	if err := tx.QueryRow(ctx, sql.LedgerChangeOrders, ids, versions, next.Status, c.event, references,
		released, orders[0].SaleID, c.reason, c.operator).Scan(&changed, &at); err != nil {
		return at, err
	}
	at = at.UTC()
	if changed != len(orders) {
		return at, fmt.Errorf("%w: %d of %d are unchanged since they were read", errNotLocked, changed, len(orders))
	}
	if !released {
		return at, nil
	}
	sale, units, items := orders[0].SaleID, int64(0), []int64(nil)
	for _, o := range orders {
		units, items = units+o.Quantity, addUnits(items, o.Lines)
	}
	if items != nil {
		if _, err := tx.Exec(ctx, sql.LedgerAddSoldItems, sale, order.MakeLines(items), -1); err != nil {
			return at, &saleError{sale, err}
		}
	}
	var archived bool
	err = tx.QueryRow(ctx, sql.LedgerReturnSold, sale, units).Scan(&archived)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // the audit reports that the sale is missing
	case err != nil:
		return at, &saleError{sale, err}
	case archived:
		return at, order.ErrArchived
	}
	return at, nil
}

// NeedsRelease reports whether an order's reservation may still be in Redis and must be released. That is
// so if the order was rejected, even by an earlier delivery: the worker that recorded it may have crashed
// before the release. It is also so if the order had ended before this event arrived: an ingress that got
// no answer retries with the same order, and makes a second reservation if Redis has lost or released the
// first one.
func NeedsRelease(out Outcome) bool {
	return out.Status == order.StatusRejected || out.Err == nil && !out.Fresh && !out.Status.Live()
}

// ReleaseOf returns the release of the order's units.
func ReleaseOf(out Outcome) reservation.Release {
	e := &out.Event
	return reservation.Release{
		SaleID: e.SaleID, OrderID: e.OrderID, UserID: e.UserID, Quantity: e.Quantity, Lines: e.Lines,
		KeyFingerprint: e.KeyFingerprint, Status: out.Status,
	}
}

// ReleasesCountMax bounds the number of releases that the metrics count.
const ReleasesCountMax = 10_000

// ErrRefused is returned when Redis does not have the sale, cannot read what the buyer holds, or would
// have more units left than the stock. A rebuild repairs that; until then the releases are kept.
var ErrRefused = errors.New("the units were refused by Redis")

// PendingReleases returns the number of releases, counted up to ReleasesCountMax. The error is ErrRefused
// if Redis has refused one of them.
func (l *Ledger) PendingReleases(ctx context.Context) (pending int, err error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	var id, sale *uuid.UUID
	if err := l.pool.QueryRow(ctx, sql.LedgerPendingReleases, ReleasesCountMax).Scan(&pending, &id, &sale); err != nil {
		return 0, fmt.Errorf("count releases: %w", err)
	}
	if id != nil {
		return pending, fmt.Errorf("%w of sale=%s order=%s, and maybe of others", ErrRefused, sale, id)
	}
	return pending, nil
}

// releasePartitions bounds the partitions in which a sweep releases units at a time. Each uses a connection to
// Postgres.
const releasePartitions = 2

// SweepReleases releases the units of ended orders in Redis, and returns of how many orders. Partitions are
// independent: one whose server does not answer is asked once, and delays no other.
func (l *Ledger) SweepReleases(ctx context.Context, store *reservation.Store) (released int, err error) {
	due, err := l.dueReleases(ctx)
	if err != nil {
		return 0, err
	}
	var all atomic.Int64
	err = store.EachAnswering(ctx, slices.Sorted(maps.Keys(due)), releasePartitions,
		func(ctx context.Context, partition int) error {
			n, err := SweepSales(ctx, func(ctx context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
				among := slices.DeleteFunc(slices.Clone(due[partition]), func(sale uuid.UUID) bool {
					return slices.Contains(except, sale)
				})
				return l.releaseSome(ctx, store, among)
			})
			all.Add(int64(n))
			return err
		})
	return int(all.Load()), err
}

// dueReleases returns the sales of which releases are due, by partition. A sale with several shards is in the list of
// each of its partitions, so that it has a turn if any of them answers. The first one takes them all.
func (l *Ledger) dueReleases(ctx context.Context) (map[int][]uuid.UUID, error) {
	ctx, cancel := context.WithTimeout(ctx, RecordTimeout)
	defer cancel()
	rows, _ := l.pool.Query(ctx, sql.LedgerDueReleases) // its error comes with the rows
	due := map[int][]uuid.UUID{}
	var sale uuid.UUID
	var partitions, shards int
	_, err := pgx.ForEachRow(rows, []any{&sale, &partitions, &shards}, func() error {
		layout := reservation.LayoutOf(sale, partitions, shards)
		for shard := range layout.Shards {
			p := layout.Partition(shard)
			due[p] = append(due[p], sale)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list due releases: %w", err)
	}
	return due, nil
}

// releaseSome is a SweepStep among some sales. It releases the units of at most SweepMax orders of one of them in Redis
// and deletes their rows from the releases. Releases that Redis refuses are kept and retried after a while. Releases of
// an unreachable shard are retried soon, after the other releases of the sale.
//
// Rows are deleted after Redis has answered. After a crash another worker retries; lua/release.lua
// releases a unit once, because it finds the reservation gone or replaced by another order.
//
// The transaction stays open over the call to Redis on purpose: the locks on the rows are the lease of this worker, and
// end with its connection. A lease in a column needs a second write for each release, and a time after which others
// take it over. The call is bounded by retry.CallTimeout, and no buyer waits for these rows.
func (l *Ledger) releaseSome(
	ctx context.Context, store *reservation.Store, among []uuid.UUID,
) (sale uuid.UUID, released int, err error) {
	var unreached error // why no release of a sale with several shards reached Redis; their next try is noted all the same
	err = l.inTransaction(ctx, func(tx pgx.Tx) error {
		released, unreached = 0, nil
		var sharded bool
		err := tx.QueryRow(ctx, sql.LedgerReleaseSale, among).Scan(&sale, &sharded)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		} else if err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, sql.LedgerTakeReleases, sale, SweepMax) // rows carry the error
		releases, err := pgx.CollectRows(rows, pgx.RowToStructByName[reservation.Release])
		if err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeRelease)
		limited, cancel := context.WithTimeout(ctx, retry.CallTimeout)
		defer cancel()
		results, err := store.Release(limited, releases)
		switch {
		case err != nil && sharded: // perhaps only these are of the shard that cannot be reached
			unreached = err
			results = slices.Repeat([]reservation.ReleaseResult{reservation.ReleaseUnreached}, len(releases))
		case err != nil:
			return err
		}
		crashpoint.Hit(crashpoint.AfterRelease)
		// Not nil, which would be NULL.
		done, unknown, damaged, unreachable := []uuid.UUID{}, []uuid.UUID{}, []uuid.UUID{}, []uuid.UUID{}
		for i, r := range releases {
			switch results[i] {
			case reservation.Released, reservation.ReleaseNotHeld:
				done = append(done, r.OrderID)
			case reservation.ReleaseUnknownSale:
				unknown = append(unknown, r.OrderID)
			case reservation.ReleaseUnreached:
				unreachable = append(unreachable, r.OrderID)
			default: // damaged, or unknown to this version
				damaged = append(damaged, r.OrderID)
			}
		}
		var kept int
		err = tx.QueryRow(ctx, sql.LedgerNoteReleases, sale, done, unknown, damaged, unreachable).Scan(&kept)
		if err != nil {
			return err
		}
		released = len(releases) - kept
		return nil
	})
	if err == nil {
		err = unreached
	}
	if err != nil {
		return sale, 0, fmt.Errorf("release units: %w", err)
	}
	if released > 0 {
		crashpoint.Hit(crashpoint.AfterReleaseCommit)
	}
	return sale, released, nil
}
