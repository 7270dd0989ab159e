package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/pace"
	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// orderAwaited is how long money waits for an order that is in neither store.
	orderAwaited = 10 * time.Minute
	// lostOrderAwaited is that time if the stock of its sale was rebuilt since the order was made.
	lostOrderAwaited = 15 * time.Second
	// waitingMax bounds the payments of one look.
	waitingMax = 1000
)

// MayArrive reports whether an order may still come to Postgres, whose money was reported so long ago.
type MayArrive func(ctx context.Context, id uuid.UUID, ago time.Duration) (bool, error)

// SweepPayments decides about payments whose orders Postgres has by now, and makes the refund of those due whose orders
// are in neither store after ten minutes, or some seconds if their sale was rebuilt. MayArrive is asked before
// Postgres, so that an order which comes in between is found there. It returns how many it has decided about, and the
// first error.
func (l *Ledger) SweepPayments(ctx context.Context, mayArrive MayArrive) (decided int, err error) {
	var failed error
	position := int64(-1 << 63)
	for began := time.Now(); time.Since(began) < sweepTurn; {
		rows, _ := l.pool.Query(ctx, sql.PaymentWaiting, position, waitingMax) // rows carry the error
		found, err := pgx.CollectRows(rows, pgx.RowToStructByName[waitingPayment])
		if err != nil {
			return decided, fmt.Errorf("find waiting payments: %w", err)
		}
		var batch []*report
		for _, w := range found {
			position = w.Position
			r := &report{Money: order.Money{Reference: w.Reference, OrderID: w.OrderID}, waiting: true}
			if r.missing, err = w.missing(ctx, mayArrive); err != nil && failed == nil {
				failed = fmt.Errorf("payment=%s order=%s: %w", w.Reference, w.OrderID, err)
			}
			if w.Found || r.missing != "" {
				batch = append(batch, r)
			}
		}
		for len(batch) > 0 {
			n := min(len(batch), paymentsMax)
			done, err := l.decideWaiting(ctx, batch[:n])
			if decided += done; err != nil && failed == nil {
				failed = err
			}
			batch = batch[n:]
		}
		if len(found) < waitingMax {
			break
		}
	}
	return decided, failed
}

// waitingPayment is a row of waiting.sql.
type waitingPayment struct {
	Reference      string
	OrderID        uuid.UUID
	Position       int64
	Waits          float64
	Found, Rebuilt bool
}

// missing returns why the refund is due if Postgres does not have the order, or nothing if it may still come.
func (w *waitingPayment) missing(ctx context.Context, mayArrive MayArrive) (why order.PaymentReason, err error) {
	ago := time.Duration(w.Waits * float64(time.Second))
	switch {
	case w.Found:
		return "", nil
	case w.Rebuilt && ago >= lostOrderAwaited:
		why = order.RefundOrderVoided
	case ago >= orderAwaited:
		why = order.RefundOrderNotFound
	default:
		return "", nil
	}
	if isArriving, err := mayArrive(ctx, w.OrderID, ago); err != nil || isArriving {
		return "", err
	}
	return why, nil
}

// decideWaiting decides about payments that wait, together, or one by one if one of them cannot be decided.
func (l *Ledger) decideWaiting(ctx context.Context, batch []*report) (decided int, err error) {
	limited, cancel := context.WithTimeout(ctx, RecordTimeout)
	err = l.decideTogether(limited, batch, false)
	cancel()
	switch {
	case err == nil:
	case len(batch) == 1:
		return 0, fmt.Errorf("payment=%s order=%s: %w", batch[0].Reference, batch[0].OrderID, err)
	case !mayBeOfOne(err):
		return 0, err
	default:
		first, err := l.decideWaiting(ctx, batch[:len(batch)/2])
		second, secondErr := l.decideWaiting(ctx, batch[len(batch)/2:])
		if err == nil {
			err = secondErr
		}
		return first + second, err
	}
	for _, r := range batch {
		if !r.isLocked && r.payment.State != order.PaymentWaiting {
			decided++
		}
	}
	return decided, nil
}

const (
	// paymentsMax bounds the reports of one transaction.
	paymentsMax = 200
	// paymentsInterval is the shortest time between two transactions while reports come often, one in paymentsFrom or
	// more: 200 a second.
	paymentsInterval = 25 * time.Millisecond
	paymentsFrom     = 5 * time.Millisecond
	// lineTimeout bounds a transaction with reports of several callers, which none of them can end.
	lineTimeout = 3 * time.Second
)

// paymentLine brings reports together: those that come during a transaction leave together in the next one. Of the
// callers that wait one leads, and makes the transaction for all; the line has no goroutine of its own. It is shared by
// all copies of a ledger.
type paymentLine struct {
	mu      sync.Mutex
	waiting []*report
	// isLed is true while a caller leads. Invariant: waiting is empty if it is false.
	isLed bool

	// Of the caller that leads: when the last transaction began, and how long after that the next one may.
	pace  pace.Pace
	began time.Time
	pause time.Duration
}

func newPaymentLine() *paymentLine {
	return &paymentLine{pace: pace.Pace{Interval: paymentsInterval, From: paymentsFrom}}
}

// decide decides about a report in the next transaction. A report whose order others have locked, or that spoils the
// transaction, leaves the line, so that the others do not wait for it.
func (line *paymentLine) decide(ctx context.Context, l *Ledger, r *report) error {
	r.arrived, r.trace = time.Now(), tracing.Current(ctx).Parent()
	if isAlone, err := line.join(ctx, l, r); !isAlone {
		return err
	}
	if err := l.decideTogether(ctx, []*report{r}, true); err != nil {
		return err
	}
	return r.err
}

// join waits until the report is decided, or is left to its caller alone.
func (line *paymentLine) join(ctx context.Context, l *Ledger, r *report) (isAlone bool, err error) {
	r.done, r.lead = make(chan struct{}), make(chan struct{}, 1)
	line.mu.Lock()
	line.waiting = append(line.waiting, r)
	if !line.isLed {
		line.isLed = true
		r.lead <- struct{}{}
	}
	line.mu.Unlock()
	select {
	case <-r.done:
	case <-r.lead:
		line.serve(ctx, l)
	case <-ctx.Done():
		if line.leave(r) {
			return false, ctx.Err()
		}
		<-r.done // its transaction runs, and is bounded
	}
	return r.isAlone, r.err
}

// leave takes a report out of the line, unless its transaction runs.
func (line *paymentLine) leave(r *report) bool {
	line.mu.Lock()
	defer line.mu.Unlock()
	at := slices.Index(line.waiting, r)
	if at < 0 {
		return false
	}
	line.waiting = slices.Delete(line.waiting, at, at+1)
	select {
	case <-r.lead:
		line.pass()
	default:
	}
	return true
}

// pass has the next caller lead, if there is one.
func (line *paymentLine) pass() {
	if line.isLed = len(line.waiting) > 0; line.isLed {
		line.waiting[0].lead <- struct{}{}
	}
}

// serve makes the transaction for those who wait. Under load it gathers reports for a moment before.
func (line *paymentLine) serve(ctx context.Context, l *Ledger) {
	retry.Pause(line.pause-time.Since(line.began), ctx.Done())
	line.mu.Lock()
	n := min(len(line.waiting), paymentsMax)
	batch := slices.Clone(line.waiting[:n])
	line.waiting = slices.Delete(line.waiting, 0, n)
	line.mu.Unlock()
	line.began = time.Now()
	line.pause = line.pace.Pause(n, line.began)

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lineTimeout)
	err := l.decideTogether(ctx, batch, false)
	cancel()
	for _, r := range batch {
		r.isAlone = r.isLocked || len(batch) > 1 && mayBeOfOne(err)
		if err != nil {
			r.err = err
		}
		close(r.done)
	}
	line.mu.Lock()
	line.pass()
	line.mu.Unlock()
}

// mayBeOfOne reports whether one report may be the cause of an error of several: a lock, or a record that is damaged.
func mayBeOfOne(err error) bool {
	return errors.Is(err, order.ErrDamaged) || IsLocked(err) || IsTooSlow(err)
}
