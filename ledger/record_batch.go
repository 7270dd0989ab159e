package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/google/uuid"

	"stampede/reservation/order"
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
